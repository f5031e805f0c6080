"""One process of a `Runner`: meets the others, calls the function, and keeps what the first got."""

import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Call what `folder` says."""
    import cloudpickle

    from scalejax import rendezvous
    from scalejax.jax_platform import choose_platform
    from scalejax.launch.runner import CALL, RESULT

    place = rendezvous.place_here()
    choose_platform()
    rendezvous.join(place)  # before the function is loaded, which may import JAX and use it
    function, arguments = cloudpickle.loads((folder / CALL).read_bytes())
    with rendezvous.leaving_at_once(place):
        value = function(**arguments)
    if place is None or place.process == 0:
        (folder / RESULT).write_bytes(cloudpickle.dumps(value))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
