import json
import subprocess

import pytest

from lab import packages, variant
from spark_deploy.config.checkout import CHECKOUT


@pytest.mark.parametrize("name", variant.names())
def test_lab_variant_has_every_file_it_names(name):
    read = variant.read(name)
    for package in (*read.stand_ins, *read.unpacked):
        control = packages.stub_control(package)
        assert control["Package"] == package
        assert control["Version"].endswith("+labstub")
    units = read.directory / "files/etc/systemd/system"
    assert [unit for unit in read.units if not (units / unit).exists()] == []
    subprocess.run(["sh", "-n", read.directory / "owner.sh"], check=True)
    system = read.settings.get("expect", {}).get("os")
    assert system == (f"debian {read.release.version}" if read.release else None)


def test_every_recorded_variant_run_passed_and_kept_owner_files():
    rows = json.loads((CHECKOUT / "proofs/results/lab/variants.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == variant.names()
    for row in rows:
        assert row["doctor"]["exit_code"] == 0
        assert row["first"]["served"]
        assert row["second"]["changed"] == row["owners"]["changed"] == 0
        assert row["owners"]["files"] > 100
        assert row["rebooted"] == {"served": True, "owners_changed": 0, "changed": 0}
