import pytest
from huggingface_hub import constants

from spark_deploy.config.errors import SettingsError
from spark_deploy.config.settings.patterns import SecretRef
from spark_deploy.config.settings.sources import HubSettings
from spark_deploy.lock.resolve import read_hub_token

MIRROR = "https://mirror.example"


@pytest.mark.parametrize(
    ("environment", "settings", "token"),
    [
        ({}, HubSettings(), None),
        ({"HF_TOKEN": "hf_login"}, HubSettings(), "hf_login"),
        ({"HF_TOKEN": "hf_login"}, HubSettings(endpoint="https://huggingface.co/"), "hf_login"),
        ({"HF_TOKEN": "hf_login"}, HubSettings(endpoint=MIRROR), None),
        ({"HF_TOKEN": "hf_login", "HF_ENDPOINT": MIRROR}, HubSettings(endpoint=MIRROR), "hf_login"),
        ({"HF_TOKEN": "hf_login", "HF_ENDPOINT": MIRROR}, HubSettings(), None),
        ({"HF_TOKEN": "hf_login"}, HubSettings(token=SecretRef(env="MINE")), "hf_mine"),
        ({"HF_TOKEN": "hf_login", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}, HubSettings(), None),
        ({"HF_TOKEN": "two words"}, HubSettings(), None),
        ({"FILE": "hf_file\n"}, HubSettings(), "hf_file"),
    ],
)
def test_sends_hugging_face_token_only_to_the_hub_it_belongs_to(
    tmp_path, monkeypatch, environment, settings, token
):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").write_text(environment.get("FILE", ""))  # of `hf auth login`
    # The library reads these two from the environment when it is imported.
    hub = environment.get("HF_ENDPOINT", "https://huggingface.co")
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    off = "HF_HUB_DISABLE_IMPLICIT_TOKEN"
    monkeypatch.setattr(constants, off, environment.get(off) == "1")
    for name, value in {"MINE": "hf_mine", **environment}.items():
        monkeypatch.setenv(name, value)
    assert read_hub_token(settings) == token


@pytest.mark.parametrize("text", ["two words", "tab\there", "schl\u00fcssel", "x" * 513])
def test_rejects_malformed_token_without_printing_it(tmp_path, text):
    (tmp_path / "token").write_text(text)
    with pytest.raises(SettingsError, match=r"hub\.token") as caught:
        read_hub_token(HubSettings(token=SecretRef(file=str(tmp_path / "token"))))
    assert text not in str(caught.value)
