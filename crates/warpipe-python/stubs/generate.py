"""Writes python/warpipe/_warpipe.pyi: the types of types.pyi with the docstrings of the native half.

`cargo xtask python --stubs` builds the package and runs this. By hand, with an interpreter that has the package as
it is built now:

    ../../target/python-tests/bin/python stubs/generate.py

A test fails when the file is not what this writes. Signatures are compared by mypy's stubtest.
"""

import ast
import inspect
import pathlib
import textwrap

HERE = pathlib.Path(__file__).parent
STUB = HERE.parent / "python/warpipe/_warpipe.pyi"


def stub():
    """The text of the stub."""
    from warpipe import _warpipe

    text = (HERE / "types.pyi").read_text()
    lines = text.splitlines()
    # From the end, so that the numbers of the lines before stay what they are.
    for line, indent, doc in sorted(documented(ast.parse(text), _warpipe), reverse=True):
        head = lines[line].removesuffix(" ...").rstrip()
        lines[line : line + 1] = [head, *quoted(doc, indent)]
    return "# Written by stubs/generate.py: types are in stubs/types.pyi, texts in src/.\n" + "\n".join(lines) + "\n"


def documented(module, native):
    """The line before each docstring's place, its indentation, and the docstring."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            yield from place(node, getattr(native, node.name), 4)
        if not isinstance(node, ast.ClassDef) or not hasattr(native, node.name):
            continue
        found = getattr(native, node.name)
        yield from place(node, found, 4)
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                yield from place(member, inspect.getattr_static(found, member.name), 8)


def place(node, found, indent):
    doc = getattr(found, "__func__", found).__doc__
    first = node.body[0]
    if not doc:
        return
    if isinstance(node, ast.ClassDef) and first.lineno > node.lineno:
        # Before the decorators of its first member.
        above = min([first.lineno, *(line.lineno for line in getattr(first, "decorator_list", []))]) - 2
        yield above, indent, doc
    else:
        yield first.end_lineno - 1, indent, doc


def quoted(doc, indent):
    doc = inspect.cleandoc(doc)
    assert "\\" not in doc and '"""' not in doc, doc
    if doc.endswith('"'):
        doc += " "
    body = f'"""{doc}"""' if "\n" not in doc else f'"""{doc}\n"""'
    return textwrap.indent(body, " " * indent).splitlines()


if __name__ == "__main__":
    STUB.write_text(stub())
