import json
from http.server import BaseHTTPRequestHandler

import pytest
from results import KEY, result, serving

from spark_deploy.bench import report
from spark_deploy.bench.protocols import (
    Endpoint,
    find_problem,
    measure_tools,
    merge_deltas,
    read_cases,
)
from spark_deploy.bench.result import ToolCase
from spark_deploy.config.errors import SparkError

CASES = {case.name: case for case in read_cases()}


def message(*calls, content=""):
    made = [
        {"name": name, "arguments": text if isinstance(text, str) else json.dumps(text)}
        for name, text in calls
    ]
    return {"content": content, "tool_calls": made}


def test_cases_cover_every_kind_of_argument_and_call():
    schemas = json.dumps([case.tools for case in CASES.values()])
    for kind in ("integer", "number", "boolean", "array", "object", "null", "enum"):
        assert f'"{kind}"' in schemas
    assert len(CASES) == 20
    assert sum(case.stream for case in CASES.values()) >= 8
    assert sum(len(case.calls) > 1 for case in CASES.values()) >= 2
    assert any(len(case.tools) > 4 for case in CASES.values())
    assert any(turn["role"] == "tool" for case in CASES.values() for turn in case.messages)


@pytest.mark.parametrize("name", CASES)
def test_expected_calls_count_as_correct_in_any_order(name):
    case = CASES[name]
    assert find_problem(case, message(*reversed(case.calls))) is None


def changed(name, **arguments):
    [(tool, right)] = CASES[name].calls
    return message((tool, {**right, **arguments}))


WRONG = [
    ("integer", changed("integer", days="3")),
    ("integer", changed("integer", days=4)),
    ("integer", changed("integer", unit="kelvin")),
    ("integer", changed("integer", extra=1)),
    ("integer", message(("get_weather", '{"city": "Lisbon", "days": 3'))),
    ("integer", message(("get_weather", "[]"))),
    ("integer", message(("weather", {}))),
    ("integer", message(content="<tool_call><function=get_weather>")),
    ("integer", message(*CASES["integer"].calls * 2)),
    ("number and false", changed("number and false", boost="false")),
    ("list of lists", changed("list of lists", rows="[[1, 2, 3], [40, 50, 60]]")),
    ("list of lists", changed("list of lists", rows=[["1", 2, 3], [40, 50, 60]])),
    ("digits as strings, streamed", changed("digits as strings, streamed", tags=[2024, 7, True])),
    ("integer or null, null", changed("integer or null, null", limit="null")),
    ("parallel calls", message(CASES["parallel calls"].calls[0])),
]


@pytest.mark.parametrize(("name", "answer"), WRONG)
def test_calls_with_wrong_names_types_or_values_are_incorrect(name, answer):
    assert find_problem(CASES[name], answer)


def test_integer_and_equal_float_arguments_are_both_correct():
    assert (
        find_problem(CASES["one of several tools"], changed("one of several tools", celsius=18.0))
        is None
    )


class Server(BaseHTTPRequestHandler):
    status = 200

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(self.status)
        self.end_headers()
        if self.status != 200:
            return
        case = next(case for case in CASES.values() if case.messages == body["messages"])
        calls = [
            {
                "index": number,
                "id": "x",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for number, (name, arguments) in enumerate(case.calls)
        ]
        if not body["stream"]:
            for call in calls:
                del call["index"]
            self.wfile.write(json.dumps({"choices": [{"message": {"tool_calls": calls}}]}).encode())
            return
        for call in calls:
            text = call["function"]["arguments"]
            rest = {"index": call["index"], "function": {"arguments": text[7:]}}
            call["function"]["arguments"] = text[:7]
            for part in (call, rest):
                chunk = {"choices": [{"delta": {"tool_calls": [part]}}]}
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *words):
        pass


@pytest.fixture
def server():
    handler = type("Handler", (Server,), {})
    with serving(handler) as url:
        yield handler, Endpoint(url, "m", KEY)


def test_reads_streamed_and_complete_answers(server):
    results = list(measure_tools(server[1], lambda text: None))
    assert [(case.name, case.problem) for case in results] == [(name, None) for name in CASES]


def test_rejected_request_fails_its_case_and_other_errors_end_the_run(server):
    handler, endpoint = server
    handler.status = 400
    assert all("HTTP 400" in (case.problem or "") for case in measure_tools(endpoint, print))
    handler.status = 503
    with pytest.raises(SparkError, match="HTTP 503"):
        list(measure_tools(endpoint, print))


def test_streamed_parts_of_parallel_calls_are_merged_by_index():
    def part(index, **function):
        return {"choices": [{"delta": {"tool_calls": [{"index": index, "function": function}]}}]}

    parts = [
        part(1, name="b", arguments="{"),
        part(0, name="a", arguments="{}"),
        part(1, arguments="}"),
    ]
    assert [(c["name"], c["arguments"]) for c in merge_deltas(iter(parts))["tool_calls"]] == [
        ("a", "{}"), ("b", "{}"),
    ]  # fmt: skip


def test_report_lists_only_failed_tool_cases():
    first = result(tools=(ToolCase("integer", None), ToolCase("enum", "days: '3'")))
    table = report.tools_table([first, result("v3")])
    assert table[1:] == [
        ["correct", "1 of 2", "-"],
        ["integer", "correct", "-"],
        ["enum", "days: '3'", "-"],
    ]
