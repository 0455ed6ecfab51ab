"""One word, one meaning: a class name stands for one class, and the glossary for what is there."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLOSSARY = (ROOT / "docs/reference/glossary.md").read_text()
TERMS = re.findall(r"^([A-Z][\w, ]*)\n: ", GLOSSARY, re.M)
CLASSES = re.findall(r"^\| ([\w, ]+) \| `(\w+)` \| `([\w.]+)` \|$", GLOSSARY, re.M)


def defined() -> dict[str, set[str]]:
    """Public class name -> the modules of jax_attn that define it; not classes in functions."""
    homes: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "jax_attn").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "jax_attn").with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(module)
    return homes


def test_a_class_name_is_defined_once():
    assert {name: homes for name, homes in defined().items() if len(homes) > 1} == {}


def test_a_word_is_explained_once_in_its_place():
    assert len(TERMS) > 30
    assert sorted({*TERMS}, key=str.lower) == TERMS


def test_the_glossary_s_classes_are_there():
    homes = defined()
    lost = [
        (name, room)
        for word, name, room in CLASSES
        if word not in {term.lower() for term in TERMS}
        or not any(home.startswith(f"{room}.") for home in homes[name])
    ]
    assert len(CLASSES) > 20
    assert lost == []
