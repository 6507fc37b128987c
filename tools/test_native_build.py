"""Run pytest on another build of the native module: test_native_build.py BUILD_DIRECTORY [pytest's arguments]."""

import importlib.util
import sys
from pathlib import Path

import pytest

_NAME = "penstock._native"


def main() -> int:
    (path,) = Path(sys.argv[1]).glob("_native.*.so")
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[_NAME] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return int(pytest.main(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
