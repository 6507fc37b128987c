from penstock.deploy.commands.first_chat import _text_of


def test_text_is_taken_out_of_the_stream() -> None:
    assert _text_of(b'data: {"choices":[{"delta":{"content":"Pen"}}]}\n') == "Pen"
    assert _text_of(b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n') == ""
    assert _text_of(b'data: {"choices":[],"usage":{}}\n') == ""
    assert _text_of(b"data: [DONE]\n") == _text_of(b"\n") == ""


def test_an_error_shows_its_own_message() -> None:
    assert _text_of(b'{"error":{"message":"no worker is ready"}}') == "(no answer: no worker is ready)"
