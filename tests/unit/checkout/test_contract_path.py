import subprocess
import sys

from spark_deploy.config.checkout import CHECKOUT


def test_checkout_imports_the_contract_package_without_installing_it():
    code = (
        f"import sys; sys.path.insert(0, {str(CHECKOUT)!r}); import spark_deploy; "
        "import spark_contract; print(spark_contract.__file__)"
    )
    # -S: no site-packages, as in an environment made before the contract was there.
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False, env={}
    )
    assert result.stderr == ""
    assert result.stdout.strip() == f"{CHECKOUT}/files/contract/spark_contract/__init__.py"
