"""Prints what an installed distribution needs on this machine, with torch as it is and without torch's companions."""

import importlib.metadata
import sys

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}


def main() -> None:
    """The one argument is the distribution's name."""
    wanted = []
    for text in importlib.metadata.requires(sys.argv[1]) or ():
        requirement = Requirement(text)
        if requirement.name in LEFT_OUT or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        requirement.marker = None
        wanted.append(str(requirement))
    # Else something that needs torch might bring another one.
    wanted.append(f"torch=={importlib.metadata.version('torch')}")
    sys.stdout.write("\n".join(wanted) + "\n")


main()
