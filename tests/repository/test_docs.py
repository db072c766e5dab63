"""What the documents promise is there."""

import re

import pytest

CHANGES = {
    '"SmolLM2-135M-Instruct"': '"tiny"',
    "steps=20": "steps=2, prompts_per_step=2, group_size=2",
    "range(10)": "range(3)",
    "grpo-1/step-10": "grpo-1/step-2",
    "by-hand": "by-hand-readme",
}
"""How the README's examples are shortened to run as tests."""


def blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("numbers", [(0, 1, 2), (3,), (4,)], ids=["notebook", "steps", "by hand"])
def test_readme_examples_run(root, numbers, empty_home, capsys):
    scope: dict[str, object] = {}
    for number in numbers:  # the later ones go on with what the first one made
        code = blocks((root / "README.md").read_text())[number]
        for old, new in CHANGES.items():
            code = code.replace(old, new)
        exec(compile(code, f"README.md, example {number}", "exec"), scope)
    said = capsys.readouterr()
    # A lab writes a line per step to standard error where there is no notebook.
    assert said.out.strip() or "step 2 of 2" in said.err


def test_readme_examples_are_all_tested(root):
    assert len(blocks((root / "README.md").read_text())) == 5


def test_links_between_documents_lead_somewhere(root):
    for document in root.glob("*.md"):
        for target in re.findall(r"\]\(([^):#]+)\)", document.read_text()):
            assert (root / target).exists(), f"{document.name} links to {target}"


def test_commands_in_the_readme_exist(root):
    text = (root / "README.md").read_text()
    makefile = (root / "Makefile").read_text()
    for target in set(re.findall(r"[`$] ?make ([a-z]+)", text)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
