from __future__ import annotations

from collections.abc import Callable

from click.testing import Result
from fake_client import FakeServer

from fastserve_hpc.errors import RequestError

Run = Callable[..., Result]


def test_each_line_of_a_pipe_is_a_turn_that_remembers(run: Run, server: FakeServer) -> None:
    result = run("chat", "--system", "s", input="one\n\ntwo\n")
    assert (result.exit_code, result.stdout) == (0, "echo one\necho two\n")
    assert [message["content"] for message in server.requests[1]["prompt"]] == ["s", "one", "echo one", "two"]
    assert [message["role"] for message in server.requests[1]["prompt"]] == ["system", "user", "assistant", "user"]


def test_reset_forgets_system_stays_and_quit_ends(run: Run, server: FakeServer) -> None:
    run("chat", input="/system terse\none\n/reset\ntwo\n/quit\nthree\n")
    assert [r["prompt"] for r in server.requests] == [
        [{"role": "system", "content": "terse"}, {"role": "user", "content": "one"}],
        [{"role": "system", "content": "terse"}, {"role": "user", "content": "two"}],
    ]


def test_an_unknown_command_shows_the_known_ones(run: Run, server: FakeServer) -> None:
    assert "/reset" in run("chat", input="/what\n").stdout
    assert server.requests == []


def test_a_refused_turn_is_dropped_and_the_chat_goes_on(run: Run, server: FakeServer) -> None:
    server.errors["long"] = [RequestError("over the context")]
    result = run("chat", input="long\nshort\n")
    assert result.exit_code == 0
    assert "error: over the context; /reset starts over" in result.stderr
    assert [message["content"] for message in server.requests[1]["prompt"]] == ["short"]


def test_ctrl_c_stops_one_answer(run: Run, server: FakeServer) -> None:
    server.errors["stop me"] = [KeyboardInterrupt()]
    result = run("chat", input="stop me\nthen\n")
    assert (result.exit_code, result.stdout) == (0, " (stopped)\necho then\n")


def test_model_output_is_not_taken_for_markup(run: Run) -> None:
    assert run("chat", input="[bold]x[/bold]\n").stdout == "echo [bold]x[/bold]\n"
