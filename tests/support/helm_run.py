"""Helm itself in a process of its own: renders a chart with the values of each line of its input, and lints the chart.

`python -m tests.support.helm_run CHART` reads one JSON document of values a line, and writes one line of JSON for each: the
manifests by template, or the error; the last line is what lint says.
"""

import json
import sys
from typing import Any

import helm_python


def main(directory: str) -> None:
    with helm_python.Chart.load(directory) as chart:
        for line in sys.stdin:
            values = json.loads(line)
            try:
                chart.validate_schema(values)
                answer: dict[str, Any] = {"manifests": chart.render(values=values, name="release")}
            except helm_python.HelmError as error:
                answer = {"error": str(error)}
            print(json.dumps(answer))
    print(json.dumps(helm_python.lint(directory)))


if __name__ == "__main__":
    main(sys.argv[1])
