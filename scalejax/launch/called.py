"""One process of a `Runner`: joins the process group, calls the function, saves its result.

A separate file, as the package imports `runner`, and Python warns about running an imported module.
"""

import sys
from pathlib import Path


def main(folder: Path, stuck_seconds: float) -> None:
    """Join the process group, call the function pickled in `folder`, and save its result. The
    function reports no progress, so processes are watched only for silence."""
    import cloudpickle

    from scalejax.core import process_group
    from scalejax.core.environment import choose_platform
    from scalejax.launch.peers import PeerWatch
    from scalejax.launch.runner import CALL, RESULT

    place = process_group.place_here()
    choose_platform()
    process_group.join(place)  # before the function is loaded, which may import JAX and use it
    with (
        process_group.leaving_at_once(place),
        PeerWatch(place, stuck_seconds, has_progress=False),
    ):
        function, arguments = cloudpickle.loads((folder / CALL).read_bytes())
        value = function(**arguments)
    if place is None or place.process == 0:
        (folder / RESULT).write_bytes(cloudpickle.dumps(value))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
