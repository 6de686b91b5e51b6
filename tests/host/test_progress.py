import time

from tests.runs import read_output

LONGEST_SILENCE_S = 10


def test_first_deploy_prints_progress(fleet):
    assert fleet.first.seconds > 3 * LONGEST_SILENCE_S
    assert fleet.first.silence.seconds <= LONGEST_SILENCE_S, fleet.first.silence


def test_slow_job_and_slow_engine_print_progress(fleet):
    fleet.settle()
    guest = fleet.guests[0]
    job_s, load_s = 15, 40
    slow = "/run/systemd/system/spark-job@.service.d/slow.conf"
    guest.run(
        f"mkdir -p $(dirname {slow}); printf '[Service]\\nExecStartPre=sleep {job_s}\\n' > {slow}; "
        "systemctl daemon-reload; rm -r /srv/spark/models/*"
    )
    fleet.site.choose(
        engine={"environment": {"STUB_LOAD_S": str(load_s)}}, expect={"unit_overrides": [slow]}
    )
    began = time.monotonic()
    run = fleet.site.start("--limit", guest.name)
    assert run.stdout is not None
    try:
        output, silence = read_output(run.stdout, began)
    finally:
        guest.run(f"rm {slow}; systemctl daemon-reload")
        run.kill()
    took_s = time.monotonic() - began

    assert run.wait(timeout=60) == 0, output[-4000:]
    assert took_s > job_s + load_s
    assert silence.seconds <= LONGEST_SILENCE_S, silence
    fleet.settle()
