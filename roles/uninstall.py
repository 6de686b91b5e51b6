from pyinfra.api import deploy

from spark_deploy.hosts import uninstall


@deploy("Uninstall")
def apply(*, request: str) -> None:
    uninstall.uninstall(name="Remove managed resources", request=request)
