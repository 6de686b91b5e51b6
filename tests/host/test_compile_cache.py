from tests.host.gateway_host import GatewayHost
from tests.host.test_upgrades import NEW, OLD, set_driver


def cache_of(gateway: GatewayHost) -> str:
    mounts = gateway.guest.container()["Mounts"]
    return next(str(mount["Source"]) for mount in mounts if mount["Destination"] == "/cache")


def write_kernel(gateway: GatewayHost, text: str) -> None:
    nv = f"{cache_of(gateway)}/nv"
    gateway.guest.run(
        f"install -d -o spark-engine {nv}; echo {text} > {nv}/kernel; "
        f"chown spark-engine {nv}/kernel"
    )


def list_files(gateway: GatewayHost, folder: str) -> str:
    return gateway.guest.run(
        f"cd {folder} && find . -printf '%p %u %i %T@ %C@\\n' | sort && find . -type f "
        "-exec sha256sum {} +"
    )


def test_cache_survives_rollout_but_not_new_driver(gateway: GatewayHost) -> None:
    guest, site = gateway.guest, gateway.site
    site.choose(profile="v2")
    gateway.deploy().assert_succeeded()
    old, unit = cache_of(gateway), guest.serving()[0]
    write_kernel(gateway, "proven")
    before = list_files(gateway, old)

    site.choose(engine={"environment": {"STUB_FAULT": "low-acceptance"}})
    assert site.deploy().exit_code != 0
    assert guest.serving() == [unit]
    assert cache_of(gateway) == old
    assert list_files(gateway, old) == before
    copies = guest.run(f"cat {old.rpartition('/')[0]}/*/nv/kernel").split()
    assert copies == ["proven", "proven"]

    # Another release on the same base image (the stub takes no plugin).
    site.choose(profile="v2-native", engine={})
    site.deploy().assert_succeeded()
    new = cache_of(gateway)
    assert new != old
    assert guest.run(f"cat {new}/nv/kernel") == "proven"
    write_kernel(gateway, "new")
    assert guest.run(f"cat {old}/nv/kernel") == "proven"
    site.deploy().assert_unchanged()

    site.deploy(deploy="deploys/prune.py").assert_succeeded()
    left = guest.run(f"ls -A {new.rpartition('/')[0]}").split()
    assert sorted(left) == sorted(path.rpartition("/")[2] for path in (old, new))

    set_driver(guest, OLD, NEW)
    try:
        guest.run(f"systemctl restart {guest.serving()[0]}")
        assert guest.answers()
        assert cache_of(gateway) == new
        assert guest.run(f"ls -A {new}") == ""
    finally:
        set_driver(guest, NEW, OLD)
