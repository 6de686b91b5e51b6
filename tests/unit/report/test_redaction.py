import copy
import json

import pytest
from hosts import CHECKS, EVIDENCE, PROOF, data_of, report_of, status_of
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from spark_deploy.cli.report import Report, redact_text, render_report

HEX = st.text("0123456789abcdef", min_size=2, max_size=2)
MACS = st.lists(HEX, min_size=6, max_size=6).flatmap(
    lambda parts: st.sampled_from([
        ":".join(parts), "-".join(parts).upper(),
        ".".join("".join(parts[at : at + 2]) for at in (0, 2, 4)),
    ])
)  # fmt: skip
PUBLIC = st.ip_addresses(v=4, network="93.184.0.0/15").map(str)
PUBLIC6 = st.ip_addresses(v=6, network="2606:2800::/32").map(str)
ALNUM = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
TOKENS = st.builds(
    lambda begin, rest: begin + rest,
    st.sampled_from(["hf_", "sk-", "ghp_", "nvapi-", "Bearer "]),
    st.text(ALNUM, min_size=20, max_size=40),
)
# Like those of `openssl rand` and Python's secrets, without a prefix.
KEYS = st.one_of(
    st.text("0123456789abcdef", min_size=32, max_size=64).filter(
        lambda key: any(c.isdigit() for c in key)
    ),
    st.text(ALNUM + "_-", min_size=43, max_size=43).filter(
        lambda key: sum(c.isdigit() for c in key) > 4
    ),
)
SERIALS = st.text("0123456789", min_size=10, max_size=13).map("Serial Number: {}".format)
CANARIES = st.one_of(MACS, PUBLIC, PUBLIC6, TOKENS, KEYS, SERIALS)
PROMPTS = st.text("abcdefghijklmnop ", min_size=12, max_size=40).map("CANARY {}".format)


def report_text(text):
    return render_report(Report(1, "now", "1.0", (report_of(text),)))


@given(canary=CANARIES, prefix=st.sampled_from(["", "it said ", "at="]), suffix=st.just(" there"))
def test_secrets_and_addresses_are_redacted(canary, prefix, suffix):
    assert canary.rpartition(" ")[2] not in redact_text(f"{prefix}{canary}{suffix}")


@example(address="2606:2800:0:1:0:1:0:1", before="mac:", after="")
@given(
    address=PUBLIC | PUBLIC6 | MACS,
    before=st.sampled_from(["", "peer:", "mac:", "http://", "ether "]),
    after=st.sampled_from(["", ": no route", ".", "/v1"]),
)
def test_addresses_next_to_punctuation_are_redacted(address, before, after):
    assert address not in redact_text(f"{before}{address}{after}")


@pytest.mark.parametrize("login", ["ann:pa$$word", "ann:s%23cret!", "token"])
def test_credentials_in_urls_are_redacted(login):
    assert redact_text(f"https://{login}@hub.example/x") == "https://<redacted>@hub.example/x"


@given(address=PUBLIC)
def test_addresses_with_a_port_are_redacted(address):
    assert redact_text(f"{address}:8000") == "<redacted>:8000"


@pytest.mark.parametrize(
    "text",
    [
        "Using Triton/FLA GDN prefill kernel (requested=triton, head_k_dim=128).",
        "Selected CutlassFp8BlockScaledMMKernel for Fp8PerBlockOnlineLinearMethod",
        "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].",
        "vllm@sha256:" + "0a" * 32,
        "main-0123456789ab", "6.17.0-1014-nvidia", "580.159.03", "0.33.0+cu130", "2.29.3",
        "2026-11-22T12:00:58Z", "5.36_0ACUM018", "NVIDIA DGX Spark", "127.0.0.1:8000",
        "--device=nvidia.com/gpu=all", "81% of 70 drafted tokens were accepted (floor 50%)",
    ],
)  # fmt: skip
def test_technical_terms_are_not_redacted(text):
    assert redact_text(text) == text


def test_personal_names_and_login_names_are_redacted():
    assert redact_text("https://me:secret@proxy/ of ann@example.org in /home/ann/x") == (
        "https://<redacted>@proxy/ of <redacted> in /home/<redacted>/x"
    )


# Without shrinking: each example makes a whole report.
@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(canary=CANARIES, prompt=PROMPTS)
def test_no_field_leaks_a_secret(canary, prompt):
    text = f"{prompt} {canary}"
    quoting = [{**item, "detail": f"{item['detail']} {text}"} for item in CHECKS]
    quoting += [{"name": "needle", "ok": False, "detail": text},
                {"name": "acceptance", "ok": False, "detail": text}]  # fmt: skip
    quoting[3] = CHECKS[3]
    proof = {**PROOF, "checks": [item for item in quoting if item["name"] != "log lines"]}
    release = {**status_of()["releases"][0], "proof": proof, "names": [text], "speed": [text]}
    status = status_of(
        releases=[release],
        jobs=[{"title": text, "last_line": text, "log_tail": [text], "result": text}],
        live={"ok": True, "release": release["name"], "detail": text},
        events={"main": [{"kind": "gateway", "text": text}, {"kind": "kill", "text": text},
                         {"kind": "hot", "text": f"the GPU is at 91 °C {canary}"}]},
        reboot_pending=text,
    )  # fmt: skip
    status["services"]["main"]["stopped_by_hand"] = None
    evidence = copy.deepcopy(EVIDENCE)
    evidence["firmware"]["bios_version"] = f"5.36 {canary}"
    evidence["engines"][0]["lines"].append(f"Using a kernel of {canary}")
    container = {
        "id": "c1",
        "name": f"/{text}",
        "image": text,
        "state": "running",
        "restart": "always",
        "runtime": "nvidia",
        "requests": None,
        "labels": {text: text},
    }
    result = report_text(
        data_of(
            status,
            evidence,
            containers=[json.dumps(container)],
            processes=[f"9001 41572864 /user.slice/x.scope {text}"],
            tailscale=[canary],
            **{"dgx-release": [f"DGX_SERIAL_NUMBER={text}", f"DGX_PLATFORM={text}"]},
        )
    )
    for secret in (canary.rpartition(" ")[2], prompt.strip()):
        assert secret not in result
    assert "of 4,000 drafted tokens" in result
