"""LoRA adapters over real processes: the openai client asks for one as for a model."""

import openai
import pytest

pytestmark = pytest.mark.slow

MODEL = "penstock-demo"
TALK = [{"role": "user", "content": "Tell me about rivers. " * 40}]
ADAPTERS = {"adapters": ["sql", "poems/v2"], "adapters_per_worker": 1}


def test_each_request_lands_where_its_adapter_is(deploy):
    async def scenario(site):
        create = site.client.chat.completions.create
        models = {model.id: model.model_extra["parent"] for model in (await site.client.models.list()).data}
        assert models == {MODEL: None, "sql": MODEL, "poems/v2": MODEL}
        assert (await site.client.models.retrieve("poems/v2")).model_extra["parent"] == MODEL
        homes = {name: worker["adapters"] for name, worker in (await site.workers()).items()}
        assert homes == {"worker-1": ["sql"], "worker-2": ["poems/v2"]}
        texts, cached = {}, []
        for model, worker in (("sql", "worker-1"), ("poems/v2", "worker-2")) * 3:
            answer = await create(
                model=model, messages=TALK, max_tokens=8, seed=1, extra_headers={"X-Penstock-Explain": "1"}
            )
            (decision,) = answer.model_extra["penstock"]["decisions"]
            assert (decision["worker"], decision["adapter"], answer.model) == (worker, model, model)
            assert [left["why"] for left in decision["left_out"]] == ["without_adapter"]
            texts.setdefault(model, set()).add(answer.choices[0].message.content)
            cached.append(answer.usage.prompt_tokens_details.cached_tokens > 100)
        assert cached == [False, False, True, True, True, True]
        assert len(texts["sql"]) == len(texts["poems/v2"]) == 1, "equal requests get equal answers"
        assert texts["sql"] != texts["poems/v2"]
        plain = await create(model=MODEL, messages=TALK, max_tokens=8, seed=1)
        assert plain.usage.prompt_tokens_details.cached_tokens == 0, "neither adapter's KV is the model's"
        with pytest.raises(openai.NotFoundError) as caught:
            await create(model="tales", messages=TALK)
        assert caught.value.body == {
            "message": f"model: 'tales' does not exist here; models: {MODEL}, poems/v2, sql",
            "type": "invalid_request_error", "param": "model", "code": "model_not_found",
        }  # fmt: skip

    deploy(scenario, workers=2, role=ADAPTERS, frontend={"port": 0, "explains": True})
