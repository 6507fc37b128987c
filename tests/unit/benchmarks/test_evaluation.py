from benchmarks.processes.asking import Answer
from benchmarks.processes.evaluation import Outcome, Question, judge

QUESTIONS = [Question("What?", ["water"]), Question("Which?", ["Apache-2.0", "the licence"])]
ANSWERS = [Answer("Water.", ("Wa", "ter", ".")), Answer("apache-2.0", ("apache", "-2.0"))]
GOOD = {
    "aggregated": Outcome(ANSWERS, 0, 0, 0, 0),
    "disaggregated": Outcome(ANSWERS, 0, 2, 4096, 0),
    "migrated": Outcome(ANSWERS, 2, 0, 0, 0),
}


def test_equal_answers_are_no_problem():
    figures, problems = judge(QUESTIONS, GOOD)
    assert problems == []
    assert figures["eval_tokens"] == 5
    assert figures["eval_score_aggregated"] == figures["eval_score_migrated"] == 1
    assert figures["eval_equal_tokens_disaggregated_share"] == 1


def test_a_token_that_differs_is_a_problem():
    other = [Answer("Water.", ("Wa", "ters", ".")), ANSWERS[1]]
    figures, problems = judge(QUESTIONS, GOOD | {"migrated": Outcome(other, 2, 0, 0, 0)})
    assert problems == ["migrated: 1 of 2 answers differ from the aggregated ones"]
    assert figures["eval_equal_tokens_migrated_share"] == 3 / 5
    assert figures["eval_equal_answers_migrated_share"] == 1 / 2
    assert figures["eval_score_migrated"] == 1


def test_a_run_in_which_nothing_moved_shows_nothing():
    _, problems = judge(
        QUESTIONS,
        GOOD | {"disaggregated": Outcome(ANSWERS, 0, 1, 0, 0), "migrated": Outcome(ANSWERS, 1, 0, 0, 0)},
    )
    assert problems == [
        "migrated: only 1 of 2 answers lost their worker in the middle",
        "disaggregated: only 1 of 2 prompts went to the prefill worker",
    ]
