import re

from stub_host import REPOSITORY

from spark_deploy.config.settings.engine import PROFILE_KEYS


def test_only_the_engine_package_has_engine_specific_names():
    package = REPOSITORY / "files/host/spark_host/engine"
    names = re.compile(r"vllm:|KV cache size:|VLLM_")
    modules = [
        path
        for folder in ("files/host", "files/contract")
        for path in (REPOSITORY / folder).rglob("*.py")
        if package not in path.parents
    ]
    assert [path for path in modules if names.search(path.read_text())] == []


def test_only_engine_plan_modules_have_engine_options():
    folder = REPOSITORY / "spark_deploy/plan"
    names = ("cluster", "engine_arguments", "guard_rails", "kv_cache")
    allowed = {folder / f"{name}.py" for name in names}
    option = re.compile(r"[\"'](?:--)?([a-z]+(?:-[a-z]+)+)[\"']")
    options = {name for path in allowed for name in option.findall(path.read_text())}
    options |= set(PROFILE_KEYS)
    assert {"max-num-seqs", "block-size", "tensor-parallel-size", "served-model-name"} <= options
    violations = set()
    for path in set(folder.rglob("*.py")) - allowed:
        text = path.read_text()
        found = options.intersection(option.findall(text))
        # The engine's name, too, except in the names of our image and plugin.
        found.update(re.findall(r"(?i)(?<!spark[-_])vllm\w*", text))
        violations |= {(str(path.relative_to(folder)), name) for name in found}
    assert violations == set()
