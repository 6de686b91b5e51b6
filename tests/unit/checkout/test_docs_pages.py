import ast
import re

import pytest
import yaml
from jsonschema import Draft202012Validator

from spark_deploy.config.checkout import CHECKOUT, load_schema
from spark_deploy.config.settings.load import load_hosts
from tests.unit.planning.plans import shipped_catalog

PAGES = sorted(
    [
        *(CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md"),
        *(CHECKOUT / "docs").rglob("*.md"),
        *(CHECKOUT / "proofs").rglob("*.md"),
    ]
)
NAMES = [str(page.relative_to(CHECKOUT)) for page in PAGES]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.M | re.S)


def text_of(name):
    return (CHECKOUT / name).read_text("utf-8")


def test_makefile_targets_named_in_docs_exist():
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.M))
    command = re.compile(r"(?:^|`)make ((?:[a-z-]+ ?)+)(?=[`#\n&|]|$)", re.M)
    shown = {word for name in NAMES for words in command.findall(text_of(name))
             for word in words.split()}  # fmt: skip
    assert shown - targets == set()


def yaml_blocks(name):
    return [block for _, language, block in FENCE.findall(text_of(name)) if language == "yaml"]


def is_part_of(kind, data):
    schema = load_schema(kind)
    if not set(data) <= set(schema["properties"]):
        return False
    whole = {key: rule for key, rule in schema.items() if key not in ("required", "if", "else")}
    return Draft202012Validator(whole).is_valid(data)


def load_settings(block, root):
    known = shipped_catalog().models
    named = re.findall(r"^model: (\S+)", block, re.M)
    for name in [name for name in named if name not in known]:
        block = block.replace(f"model: {name}", "model: qwen3.5-35b")
    (root / "group_vars").mkdir(parents=True, exist_ok=True)
    (root / "group_vars/spark.yml").write_text(block)
    load_hosts({"spark": ["spark-1"]}, root=root)


@pytest.mark.parametrize("name", [name for name in NAMES if yaml_blocks(name)])
def test_yaml_examples_in_docs_are_valid(name, tmp_path):
    for number, block in enumerate(yaml_blocks(name)):
        block = block.replace("model: NAME", "model: qwen3.5-35b").replace("NAME", "plain")
        data = yaml.safe_load(block)
        if not any(is_part_of(kind, data) for kind in ("hosts", "plain_model", "model", "profile")):
            root = tmp_path / str(number)
            write_added_models(name, root)
            load_settings(block, root)


def write_added_models(name, root):
    folder = root / "catalog/models"
    folder.mkdir(parents=True)
    for repository in re.findall(r"^spark-deploy add (\S+/\S+)", text_of(name), re.M):
        model = {"kind": "plain", "summary": "s", "choose_when": "c", "repository": repository}
        stem = repository.rpartition("/")[2].lower()
        (folder / f"{stem}.yml").write_text(yaml.safe_dump(model))


def anchors(page):
    text = FENCE.sub("", page.read_text("utf-8"))
    titles = re.findall(r"^#+ (.+?)\s*$", text, re.M)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in plain}


def is_broken(page, link):
    path, _, anchor = link.partition("#")
    linked = (page.parent / path).resolve() if path else page
    return not linked.exists() or (
        anchor and linked.suffix == ".md" and anchor not in anchors(linked)
    )


def test_links_in_docs_have_existing_targets():
    links = [
        (page, link)
        for page, name in zip(PAGES, NAMES, strict=True)
        for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text_of(name)))
        if not re.match(r"^[a-z]+:", link)
    ]
    assert len(links) > 100
    assert [entry for entry in links if is_broken(*entry)] == []


def test_settings_named_in_docs_exist():
    keys = load_schema("settings")["properties"]
    sections = {
        name: set(item["properties"]) for name, item in keys.items() if "properties" in item
    }
    named = {
        (page.name, section, key)
        for page in PAGES
        for section, key in re.findall(r"`([a-z_]+)\.([a-z_]+)(?=[:.`\s])", page.read_text("utf-8"))
        if section in sections
    }
    assert len(named) > 40
    assert [item for item in named if item[2] not in sections[item[1]]] == []


def test_security_promises_refer_to_existing_tests():
    promises = text_of("SECURITY.md").partition("## Promises")[2].partition("\n## ")[0]
    rows = [line for line in promises.splitlines() if line.startswith("- ")]
    assert len(rows) > 25
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, name in named:
            tree = ast.parse(text_of(f"tests/{file}"))
            functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            assert name in {node.name for node in functions}, f"{file} has no {name}"
