"""Each way in which a command can end, seen from outside: exit code, stdout, stderr."""

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable

import pytest
import typer

import kvstrata
from kvstrata.cli import app as cli_app
from kvstrata.cli.output import JsonFlag, emit_json
from kvstrata.errors import ConfigError

Action = Callable[[], None]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Action], None]:
    """Make `kvstrata trial` the only command, doing what the test says."""

    def install(action: Action) -> None:
        def register(app: typer.Typer) -> None:
            @app.command()
            def trial(count: int = 1, json: JsonFlag = False) -> None:
                """Do as the test says."""
                action()
                if json:
                    emit_json({"count": count, "ratio": float("nan"), "text": "naïve"})

        module = types.ModuleType("kvstrata.cli.trial")
        module.register = register  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "kvstrata.cli.trial", module)
        monkeypatch.setattr(cli_app, "COMMANDS", ("trial",))
        monkeypatch.delenv("KVSTRATA_DEBUG", raising=False)

    return install


def raising(error: BaseException) -> Action:
    def action() -> None:
        raise error

    return action


def test_json_is_one_object_and_has_no_nan(command, capsys):
    command(lambda: None)
    assert cli_app.main(["trial", "--count", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"count": 3, "ratio": None, "text": "naïve"}
    assert err == ""


@pytest.mark.parametrize(
    "argv", [["trial", "--bogus"], ["trial", "--count", "many"], ["nothing"], ["trial", "extra"]]
)
def test_wrong_usage_is_one_line_and_exit_2(command, capsys, argv):
    command(lambda: None)
    assert cli_app.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "--help" in err


def test_no_arguments_show_the_help_on_stderr_and_exit_2(command, capsys):
    command(lambda: None)
    assert cli_app.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "trial" in err


def test_a_users_mistake_is_one_line_and_exit_1(command, capsys):
    command(raising(ConfigError("kv_memory is '1 goat':\n give bytes or a size such as 2GiB")))
    assert cli_app.main(["trial"]) == 1
    assert capsys.readouterr().err == "error: kv_memory is '1 goat': give bytes or a size such as 2GiB\n"


def test_a_missing_file_is_named_without_traceback(command, capsys):
    command(lambda: open("/nonexistent/trace.csv").close())
    assert cli_app.main(["trial"]) == 1
    assert capsys.readouterr().err == "error: /nonexistent/trace.csv: No such file or directory\n"


def test_a_defect_of_ours_asks_for_a_report(command, capsys):
    command(raising(ZeroDivisionError("division by zero")))
    assert cli_app.main(["trial"]) == 1
    err = capsys.readouterr().err
    assert "internal error (ZeroDivisionError: division by zero)" in err
    assert "KVSTRATA_DEBUG=1" in err
    assert "Traceback" not in err


def test_debug_lets_the_traceback_through(command, monkeypatch):
    command(raising(ZeroDivisionError("division by zero")))
    monkeypatch.setenv("KVSTRATA_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        cli_app.main(["trial"])


def test_interrupt_exits_130_and_says_nothing(command, capsys):
    command(raising(KeyboardInterrupt()))
    assert cli_app.main(["trial"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_command_can_choose_its_exit_code(command):
    command(raising(typer.Exit(1)))
    assert cli_app.main(["trial"]) == 1


PRINTS_A_LOT = """
import sys, types, typer
from kvstrata.cli import app as cli_app
def register(app):
    @app.command()
    def flood():
        for line in range(200_000):
            print(line)
module = types.ModuleType("kvstrata.cli.flood")
module.register = register
sys.modules["kvstrata.cli.flood"] = module
cli_app.COMMANDS = ("flood",)
sys.exit(cli_app.main(["flood"]))
"""


def test_a_reader_that_leaves_early_gets_no_complaint():
    process = subprocess.Popen(
        [sys.executable, "-c", PRINTS_A_LOT], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"0\n"
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 1


def test_help_and_version_load_no_torch():
    script = (
        "import sys; from kvstrata.cli.app import main; main(['--help']); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_python_dash_m_tells_the_version():
    result = subprocess.run(
        [sys.executable, "-m", "kvstrata", "--version"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ,
    )
    assert result.stdout == f"kvstrata {kvstrata.__version__}\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_process_without_standard_streams_still_runs(closed):
    command = f"exec {sys.executable} -m kvstrata size smollm2 --json {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "internal error" not in done.stdout + done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_behind_stdout_is_told_in_one_line():
    command = f"exec {sys.executable} -m kvstrata size smollm2 --json > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: reading or writing failed: No space left on device\n"
