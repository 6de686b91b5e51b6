from spark_contract.records import Proof
from spark_contract.release import Release
from spark_host.check import runner
from spark_host.records import boot
from stub_host import Host


def check(host: Host, release: Release, level: str = "deep", run: str = "run-1") -> Proof:
    return runner.check(release, host.here, level, print, invocation_id=run)


def check_at_start(host: Host, release: Release) -> Proof:
    return runner.check(release, host.here, "quick", print, "run-1", at_start=True)


def stored_proof(host: Host, release: Release) -> Proof:
    stored = boot.read_proof(release.name, host.here)
    assert stored is not None
    return stored


def failed(result: Proof) -> dict[str, str]:
    return {finding.name: finding.detail for finding in result.failed}


def warned(result: Proof) -> dict[str, str]:
    return {finding.name: finding.detail for finding in result.warnings}
