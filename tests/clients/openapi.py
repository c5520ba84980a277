"""Checks the OpenAPI document of a server, and the server against it.

The document must be valid OpenAPI 3.1. Schemathesis then sends requests that follow the document
and requests that break it. No answer may be a 5xx or be missing from the document.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request

from openapi_spec_validator import OpenAPIV31SpecValidator

# Requests of each operation and phase.
EXAMPLES = 20
SEED = 1
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
]


def fetch(url):
    with urllib.request.urlopen(url + "/openapi.json", timeout=10) as response:
        return json.load(response)


def run_schemathesis(url):
    program = os.path.join(os.path.dirname(sys.executable), "schemathesis")
    command = [program, "--no-color", "run", url + "/openapi.json"]
    command += ["--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing"]
    # With several workers, Python 3.11 fails to compile some strategies.
    command += ["--max-examples", str(EXAMPLES), "--seed", str(SEED), "--workers", "1"]
    command += ["--warnings", "off", "--request-timeout", "60"]
    command += ["--generation-database", "none"]
    # Schemathesis writes its state into the current folder.
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(command, cwd=folder, check=False).returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    url = parser.parse_args().url
    document = fetch(url)
    OpenAPIV31SpecValidator(document).validate()
    paths = len(document["paths"])
    print(f"ok   the document of {paths} paths is valid OpenAPI {document['openapi']}")
    sys.exit(run_schemathesis(url))


if __name__ == "__main__":
    main()
