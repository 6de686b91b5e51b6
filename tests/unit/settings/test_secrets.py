import pytest

from spark_deploy.config.errors import SettingsError
from spark_deploy.config.settings.load import read_secret
from spark_deploy.config.settings.patterns import SecretRef


def test_reads_secret_from_file_command_or_environment_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "one\n")
    (tmp_path / "key").write_text("two\nnot this line\n")
    assert read_secret(SecretRef(env="MY_KEY"), setting="x") == "one"
    assert read_secret(SecretRef(file=str(tmp_path / "key")), setting="x") == "two"
    assert read_secret(SecretRef(command=("printf", "three")), setting="x") == "three"


@pytest.mark.parametrize(
    "reference",
    [
        SecretRef(env="NOT_SET_ANYWHERE"),
        SecretRef(file="/nonexistent/key"),
        SecretRef(file="~nobody-here/key"),
        SecretRef(command=("false",)),
        SecretRef(command=("/nonexistent/program",)),
        SecretRef(command=("true",)),
        SecretRef(),
    ],
)
def test_error_for_unreadable_secret_names_the_setting(reference):
    with pytest.raises(SettingsError, match=r"hub\.token"):
        read_secret(reference, setting="hub.token")


def test_hides_output_of_failing_secret_command():
    reference = SecretRef(command=("sh", "-c", "echo hunter2; echo hunter2 >&2; exit 3"))
    with pytest.raises(SettingsError) as caught:
        read_secret(reference, setting="hub.token")
    assert "exit status 3" in str(caught.value)
    assert "hunter2" not in str(caught.value).replace(reference.value[2], "")
