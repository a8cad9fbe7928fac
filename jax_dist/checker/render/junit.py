"""For test reports: a suite for each file, a failed test for each finding."""

import itertools
import re
from collections.abc import Sequence
from xml.etree import ElementTree

from jax_dist.checker.findings import Finding
from jax_dist.checker.render.context import Context, in_file, sentence

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(findings: Sequence[Finding], context: Context) -> str:
    """A JUnit document; without findings, one test that passed, for CI servers want one."""
    root = ElementTree.Element("testsuites", name="jax-dist lint")
    for path, group in itertools.groupby(findings, key=lambda finding: finding.path):
        _suite(root, path, list(group), context)
    if not findings:
        suite = ElementTree.SubElement(root, "testsuite", name="jax-dist", tests="1", failures="0")
        ElementTree.SubElement(suite, "testcase", name="no findings", classname="jax-dist")
    root.set("tests", str(max(1, len(findings))))
    root.set("failures", str(len(findings)))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, "unicode")}\n'


def _suite(root: ElementTree.Element, path: str, findings: list[Finding], context: Context) -> None:
    count = str(len(findings))
    name = _clean(path)
    suite = ElementTree.SubElement(root, "testsuite", name=name, tests=count, failures=count)
    for finding in findings:
        start, _ = in_file(finding, context)
        cell = f"cell {finding.start.cell}:" if finding.start.cell is not None else ""
        place = f"{cell}{finding.start.line}:{finding.start.column}"
        case = ElementTree.SubElement(
            suite,
            "testcase",
            name=f"{finding.code} {finding.name} at {place}",
            classname=name,
            file=name,
            line=str(start.line),
        )
        message = _clean(sentence(finding))
        failure = ElementTree.SubElement(case, "failure", type=finding.code, message=message)
        failure.text = _clean(f"{path}:{place}: {finding.code} {finding.message}")


def _clean(text: str) -> str:
    """Without what no XML document may hold, not even escaped."""
    return _NOT_IN_XML.sub("�", text)
