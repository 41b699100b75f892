"""Folders of the data files shipped with nwor-bench (scenarios, prompts, pairs, sweeps)."""

from pathlib import Path

from nwor_bench.errors import ConfigError

PACKAGE_DIR = Path(__file__).resolve().parents[1]


def resource_dir(name: str) -> Path:
    """The folder of shipped data called `name`, for example "scenarios".

    An installed wheel carries it inside the package; a checkout has it beside the package.
    Raises ConfigError when it is in neither place.
    """
    places = (PACKAGE_DIR / name, PACKAGE_DIR.parent / name)
    for place in places:
        if place.is_dir():
            return place
    looked = " and ".join(str(place) for place in places)
    problem = f"is missing (looked in {looked}); reinstall nwor-bench"
    raise ConfigError.at(f"data folder {name!r}", problem, joint=" ")
