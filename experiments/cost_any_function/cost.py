"""Cost `two_layers.build` on 64 H100 in three lines of Python.

Run from this folder: python cost.py
"""

from scalejax import load_cluster, predict, profile_function

cluster = load_cluster("dgx-h100")
program = profile_function("two_layers:build", cluster=cluster, mesh_axes={"batch": 8, "width": 8})
prediction = predict(program, cluster)

print(f"step {prediction.step_seconds * 1e3:.2f} ms, fits: {prediction.fits}")
for term, seconds in prediction.waterfall:
    print(f"  {term}: {'n/a' if seconds is None else f'{seconds * 1e3:.2f} ms'}")
