"""Logprobs of prompts, computed from hidden states a few rows at a time: logits of a whole prompt would not fit the device."""

import torch

from penstock.core.types.requests import PromptLogprobs
from penstock.core.wire import pack_tokens
from penstock.engine.paged.model.models import PagedModel
from penstock.engine.paged.step.batch import PromptRows

_LOGITS_BYTES = 64 << 20
"""Memory for the logits of the rows that are computed together."""


def prompt_logprobs(model: PagedModel, before: int, prompt: PromptRows) -> dict[int, PromptLogprobs]:
    """Report a step's prompt tokens, by row of the plan; see `PromptLogprobs`.

    Args:
        model: has just computed the step.
        before: rows of its hidden states before those of the prompt tokens.
        prompt: the prompt tokens.
    """
    targets = torch.from_numpy(prompt.targets).to(model.device)
    count, together = len(targets), max(_LOGITS_BYTES // (4 * model.vocab_size), 1)
    most = min(max(span.alternatives for span in prompt.spans), model.vocab_size)
    parts = [
        _logprobs(
            model.scores(before + start, before + min(start + together, count)).float(),
            targets[start : start + together],
            most,
        )
        for start in range(0, count, together)
    ]
    token_ids, logprobs, ranks = (torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))
    reported, row = {}, 0
    for span in prompt.spans:
        end, width = row + span.end - span.start, 1 + span.alternatives
        reported[span.row] = PromptLogprobs(
            start=span.start,
            token_ids=pack_tokens(token_ids[row:end, :width]),
            logprobs=logprobs[row:end, :width].astype("<f4").tobytes(),
            ranks=pack_tokens(ranks[row:end]),
        )
        row = end
    return reported


def _logprobs(
    logits: torch.Tensor, targets: torch.Tensor, alternatives: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give (rows, 1 + alternatives) token ids and logprobs, each row's target first, and the targets' (rows,) ranks."""
    chosen = logits.gather(1, targets[:, None])
    top, top_ids = logits.topk(alternatives)
    ranks = (logits > chosen).sum(1) + 1
    logprobs = torch.cat((chosen, top), 1) - logits.logsumexp(1, keepdim=True)
    return torch.cat((targets[:, None], top_ids), 1).int(), logprobs, ranks.int()
