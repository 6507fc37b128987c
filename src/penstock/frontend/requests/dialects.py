"""Every API that the frontend speaks, by name: an encoder process finds the same one."""

from penstock.frontend.anthropic.events import MESSAGES, MessageStream, WholeMessage
from penstock.frontend.anthropic.translate import check_messages, parse_count
from penstock.frontend.client_fields import ClientFields
from penstock.frontend.embeddings.bodies import check_embeddings, parse_embeddings
from penstock.frontend.openai.bodies import ChatRequest, CompletionRequest, parse_chat, parse_completion
from penstock.frontend.openai.dialect import AnswerContext, Dialect, ParsedBody, names_of
from penstock.frontend.openai.events import EventStream, TokenBytes, WholeAnswer
from penstock.frontend.openai.validation import check_chat, check_completion
from penstock.frontend.responses.events import RESPONSES
from penstock.frontend.tokens.bodies import check_tokenize, parse_tokenize


def _parse_chat(body: bytes) -> ParsedBody:
    request = parse_chat(body)
    return ParsedBody(request, fields=ClientFields(names=names_of(request)))


def _parse_completion(body: bytes) -> ParsedBody:
    request = parse_completion(body)
    return ParsedBody(request, fields=ClientFields(names=names_of(request)))


def _check_chat(parsed: ParsedBody, choices_max: int) -> None:
    assert isinstance(parsed.request, ChatRequest)
    check_chat(parsed.request, choices_max)


def _check_completion(parsed: ParsedBody, choices_max: int) -> None:
    assert isinstance(parsed.request, CompletionRequest)
    check_completion(parsed.request, choices_max)


def _token_names(context: AnswerContext) -> TokenBytes:
    return _named_by_id if context.request.return_tokens_as_token_ids else context.token_bytes


def _named_by_id(token_id: int) -> bytes:
    """Name a token of log-probabilities by its id, as vLLM does."""
    return b"token_id:%d" % token_id


def _stream(context: AnswerContext) -> EventStream:
    options = context.request.stream_options
    include_usage = options is not None and bool(options.include_usage)
    return EventStream(
        context.envelope,
        _token_names(context),
        include_usage=include_usage,
        usage_so_far=context.usage
        if include_usage and options is not None and options.continuous_usage_stats
        else None,
        before=context.annotations,
    )


def _whole(context: AnswerContext) -> WholeAnswer:
    request, logprobs, best = context.request, context.logprobs, None
    if isinstance(request, CompletionRequest) and request.answers_per_prompt > (request.n or 1):
        best, logprobs = (request.n or 1, request.answers_per_prompt), request.logprobs is not None
    return WholeAnswer(
        context.envelope, _token_names(context), choices=context.choices, logprobs=logprobs, best=best
    )


CHAT = Dialect("chat", "chatcmpl-", _parse_chat, _check_chat, _stream, _whole)
COMPLETIONS = Dialect("completions", "cmpl-", _parse_completion, _check_completion, _stream, _whole)
COUNT_TOKENS = Dialect("count_tokens", "count_", parse_count, check_messages, MessageStream, WholeMessage)
EMBEDDINGS = Dialect("embeddings", "embd-", parse_embeddings, check_embeddings, _stream, _whole)
TOKENIZE = Dialect("tokenize", "tok-", parse_tokenize, check_tokenize, _stream, _whole)
DIALECTS = {
    dialect.name: dialect
    for dialect in (CHAT, COMPLETIONS, MESSAGES, RESPONSES, COUNT_TOKENS, TOKENIZE, EMBEDDINGS)
}
