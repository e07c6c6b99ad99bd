# check: what CI checks besides the tests.  test: what the README says.  test-all: also the slow ones.
.PHONY: check format test test-all

check:
	ruff format --check .
	ruff check .
	mypy

format:
	ruff format .
	ruff check --fix .

test:
	pytest

test-all:
	pytest -m ''
