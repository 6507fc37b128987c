from penstock.deploy.commands.first_chat import _text_of, what_next


def test_text_is_taken_out_of_the_stream() -> None:
    assert _text_of(b'data: {"choices":[{"delta":{"content":"Pen"}}]}\n') == "Pen"
    assert _text_of(b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n') == ""
    assert _text_of(b'data: {"choices":[],"usage":{}}\n') == ""
    assert _text_of(b"data: [DONE]\n") == _text_of(b"\n") == ""


def test_an_error_shows_its_own_message() -> None:
    assert _text_of(b'{"error":{"message":"no worker is ready"}}') == "(no answer: no worker is ready)"


def test_what_to_try_next_can_be_pasted() -> None:
    text = what_next("http://127.0.0.1:9", "m")
    assert "curl http://127.0.0.1:9/v1/chat/completions" in text
    code = [
        line.strip()
        for line in text.splitlines()
        if "client" in line or "question =" in line or "OpenAI" in line
    ]
    compile("\n".join(code).replace("stream=True):", "stream=True): pass"), "next", "exec")
    assert 'model="m"' in text
