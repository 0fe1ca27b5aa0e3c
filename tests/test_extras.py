# SPDX-License-Identifier: Apache-2.0
"""Dashboard, alerting rules and schema in extras/ are about what the code says."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from event_docs import KINDS, schema
from support.processes import REPOSITORY

from adaptra_megatron.telemetry.events import (
    Event,
    IterationsTimed,
    LinkDetection,
    PlanMade,
    RanksLost,
    RunEnded,
    RunStarted,
    Stamp,
    StampedEvent,
    encode,
)
from adaptra_megatron.telemetry.exported_figures import METRICS

EXTRAS = REPOSITORY / "extras"
SERVED = {f"{name}_total" if metric.counter else name: metric for name, metric in METRICS.items()}
PROMTOOL = shutil.which("promtool")


def dashboard() -> dict[str, Any]:
    return json.loads((EXTRAS / "grafana.json").read_text())


def expressions() -> list[str]:
    """All that the dashboard and the rules ask Prometheus."""
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    return [*panels, *re.findall(r"^ +expr: (?:>-\n +)?(.+)$", (EXTRAS / "alerts.yml").read_text(), re.MULTILINE)]


def test_every_metric_that_is_asked_for_is_served_with_these_labels() -> None:
    found = expressions()
    assert len(found) > 25
    for expression in found:
        for name, given in re.findall(r"\b(adaptra_\w+)(?:{([^}]*)})?", expression):
            assert name in SERVED, f"{name} in {expression}"
            own = {"rank", "stage"} if not SERVED[name].of_job else {"replica"}
            labels = set(re.findall(r"(\w+)(?:=~|!=|=)", given))
            assert labels <= {"job", *own, *SERVED[name].labels}, expression
    asked = {name for expression in found for name in re.findall(r"\badaptra_\w+", expression)}
    assert {"adaptra_link_state", "adaptra_ranks_lost", "adaptra_failovers_total"} <= asked


def test_the_dashboard_has_panels_that_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        assert panel["description"]


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    found = dashboard()
    assert found["schemaVersion"] >= 36
    assert found["uid"]
    assert found.get("id") is None, "Grafana gives it one"
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert {"title", "type", "gridPos", "datasource", "fieldConfig", "targets"} <= panel.keys()
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            (grouping,) = re.findall(r"\bby \(([^)]*)\)", target["expr"]) or [""]
            assert shown <= ({*re.split(r",\s*", grouping)} if grouping else shown), "a label that is left"
    links = [target for panel in panels for target in panel["targets"] if "adaptra_link_latency" in target["expr"]]
    assert links
    assert all("{{from_host}} to {{to_host}}" in target["legendFormat"] for target in links)


def test_alerts_are_rules_that_prometheus_loads_and_name_hosts() -> None:
    (group,) = yaml.safe_load((EXTRAS / "alerts.yml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names) >= 10
    for rule in group["rules"]:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        summary = rule["annotations"]["summary"]
        used = set(re.findall(r"\$labels\.(\w+)", summary))
        (grouping,) = re.findall(r"\bby \(([^)]*)\)", rule["expr"])[:1] or [""]
        assert not grouping or used <= {*re.split(r",\s*", grouping)}, rule["alert"]
        if "adaptra_link_state" in rule["expr"]:
            assert {"from_host", "to_host"} <= used
        if "adaptra_stage_state" in rule["expr"]:
            assert "host" in used
    tests = yaml.safe_load((EXTRAS / "alerts_test.yml").read_text())
    assert {each["alertname"] for test in tests["tests"] for each in test["alert_rule_test"]} <= set(names)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool comes with Prometheus")
def test_promtool_takes_rules_and_queries(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    queries = {f"q{number}": each.replace("$job", ".*") for number, each in enumerate(expressions())}
    rules = [{"record": f"adaptra:{name}", "expr": each} for name, each in queries.items()]
    (tmp_path / "queries.yml").write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    for command in (["check", "rules", str(EXTRAS / "alerts.yml"), str(tmp_path / "queries.yml")], ["test", "rules"]):
        files = [str(EXTRAS / "alerts_test.yml")] if command[0] == "test" else []
        done = subprocess.run([PROMTOOL, *command, *files], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


SAMPLES: list[Event] = [
    RunStarted(layout={"stages": 4}, versions={"torch": "2.9"}, config={"policy": "adapt", "cap": None}, host="a"),
    RunEnded(reason="the program ended"),
    LinkDetection(source=0, target=1, before="healthy", after="slow", reason="it is", latency_s=0.1),
    PlanMade(
        number=1, adopted=True, reason="first", predicted_s=1.0, current_predicted_s=float("inf"), costs={"a": [1]}
    ),
    IterationsTimed(first=0, seconds=[1.0, 2], step=7),
    RanksLost(epoch=1, ranks={"rank 4": "-9"}, dead_cells=["1.1"], live=8, seconds=0.5, moved=((1, 1, 0, 3),)),
]


@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: event.name)
def test_events_are_as_the_schema_says(event: Event) -> None:
    stamp = Stamp(run="run", rank=0, sequence=1, iteration=-1, wall_s=0.5, monotonic_s=1.5)
    line = json.loads(encode(StampedEvent(stamp=stamp, event=event)))
    written = schema()
    assert fits(line, written)
    for field in dataclasses.fields(event):
        assert not fits({**line, field.name: object}, written), "nothing of JSON"
    assert not fits({**line, "event": "nothing"}, written)
    assert not fits({name: value for name, value in line.items() if name != "rank"}, written)


def test_the_schema_has_every_kind() -> None:
    written = json.loads((EXTRAS / "events.schema.json").read_text())
    assert [kind["properties"]["event"]["const"] for kind in written["oneOf"]] == [kind.name for kind in KINDS]


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """The keywords that the schema uses, as JSON Schema defines them."""
    for keyword, options in (("oneOf", schema.get("oneOf")), ("anyOf", schema.get("anyOf"))):
        if options is not None:
            matching = sum(fits(value, option) for option in options)
            return matching == 1 if keyword == "oneOf" else matching > 0
    if "const" in schema:
        return bool(value == schema["const"])
    kinds = schema.get("type", [])
    if not kinds:
        return value is not object
    if not any(is_a(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return False
    if isinstance(value, list):
        return all(fits(each, schema.get("items", {})) for each in value)
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        return set(schema.get("required", ())) <= set(value) and all(
            fits(each, known.get(name, others)) for name, each in value.items()
        )
    return True


def is_a(value: Any, kind: str) -> bool:
    types: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    if kind in types:
        return isinstance(value, types[kind])
    return isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool)
