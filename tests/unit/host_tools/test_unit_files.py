import pytest
from spark_contract.paths import Paths
from spark_host.status import unit_overrides

ETC = "/etc/systemd/system"
OURS = (
    f"{ETC}/spark-serve@.service",
    f"{ETC}/spark-daily.timer",
    f"{ETC}/spark-hours@main-0123456789ab.timer",
    f"{ETC}/spark-serve@main-0123456789ab.service.d/50-release.conf",
    f"{ETC}/spark-serve@main-0123456789ab.service.d/50-cluster.conf",
    f"{ETC}/spark-watch@main-0123456789ab.service.d/50-cluster.conf",
    f"{ETC}/spark-job@0123456789ab.service.d/order.conf",
    f"{ETC}/run-spark-engines-main.mount",
    f"{ETC}/spark-prepare@main-0123456789ab.target.d/0123456789ab.conf",
)
FOREIGN = (
    f"{ETC}/ssh.service.d/50-spark.conf",
    f"{ETC}/spark-master.service.d/override.conf",
    f"{ETC}/spark-worker.service",
    f"{ETC}/spark-serve@.service.d/README",  # systemd reads only *.conf
    f"{ETC}/spark-serve@.service.d/spark-serve@a.service",
    f"{ETC}/multi-user.target.wants/spark-serve@main-0123456789ab.service",
    "/usr/lib/systemd/system/service.d/10-timeout.conf",
    "/usr/lib/systemd/system/run-rpc_pipefs.mount",
    f"{ETC}/home.mount.d/a.conf",
)


def write(root, *files):
    for file in files:
        path = root / file.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[Service]\nExecStartPost=\n")


@pytest.mark.parametrize(
    "file",
    [
        f"{ETC}/spark-serve@.service.d/override.conf",
        f"{ETC}/spark-serve@.service.d/50-release.conf",
        f"{ETC}/spark-serve@main-0123456789ab.service.d/override.conf",
        f"{ETC}/spark-serve@main-0123456789ab.service",
        f"{ETC}/spark-.service.d/a.conf",
        f"{ETC}/spark-@.service.d/a.conf",
        f"{ETC}/spark-@main-0123456789ab.service.d/a.conf",
        f"{ETC}/service.d/a.conf",
        f"{ETC}/spark-daily.timer.d/a.conf",
        f"{ETC}/run-spark-engines-main.mount.d/x.conf",
        f"{ETC}/run-spark-.mount.d/x.conf",
        f"{ETC}/mount.d/x.conf",
        "/usr/lib/systemd/system/run-spark-engines-main.mount.d/x.conf",
        r"/run/systemd/system/run-spark-engines-my\x2dservice.mount",
        "/etc/systemd/system.control/spark-serve@main-0123456789ab.service.d/50-MemoryMax.conf",
        "/run/systemd/system.control/spark-gateway@main.service.d/50-CPUQuota.conf",
        "/run/systemd/system/spark-watch@.service.d/a.conf",
        "/usr/lib/systemd/system/spark-serve@.service.d/a.conf",
        "/run/systemd/transient/spark-serve@x.service",
    ],
)
def test_lists_files_that_change_our_units(tmp_path, file):
    write(tmp_path, *OURS, *FOREIGN, file)
    assert unit_overrides(Paths(tmp_path)) == (file,)


@pytest.mark.parametrize("name", ["spark-serve@main-0123456789ab.service", "spark-watch@.service"])
def test_lists_masked_units(tmp_path, name):
    write(tmp_path, *(file for file in OURS if not file.endswith(name)))
    (tmp_path / ETC.lstrip("/") / name).symlink_to("/dev/null")
    assert unit_overrides(Paths(tmp_path)) == (f"{ETC}/{name}",)


def test_host_without_units_has_no_overrides(tmp_path):
    assert unit_overrides(Paths(tmp_path)) == ()


def test_lists_managed_drop_in_replaced_by_a_link(tmp_path):
    write(tmp_path, *OURS)
    path = tmp_path / OURS[3].lstrip("/")
    path.unlink()
    path.symlink_to("/dev/null")
    assert unit_overrides(Paths(tmp_path)) == (OURS[3],)


@pytest.mark.parametrize("name", ["service.d", "spark-serve@.service.d"])
def test_lists_a_drop_in_directory_that_is_a_link(tmp_path, name):
    write(tmp_path, *OURS, "/tmp/d/a.conf")
    (tmp_path / ETC.lstrip("/") / name).symlink_to(tmp_path / "tmp/d")
    assert unit_overrides(Paths(tmp_path)) == (f"{ETC}/{name}",)
