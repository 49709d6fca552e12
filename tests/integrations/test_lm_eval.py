"""lm-evaluation-harness on a model that `gossamer train` wrote."""

import json
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("tokenizers")

from gossamer import train
from gossamer.integrations.transformers import patch

TASK = """
task: tiny_cloze
dataset_path: json
dataset_kwargs: {{data_files: {file}}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.native
def test_a_patched_model_is_evaluated(tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = [f"number {i} is {'odd' if i % 2 else 'even'} " * 8 for i in range(300)]
    train.pack(texts, train.learn_tokenizer(texts, 300), tmp_path / "corpus")
    corpus = train.Corpus(tmp_path / "corpus")
    train.Run(train.preset("tiny", steps=3, vocabulary=corpus.vocabulary), corpus, tmp_path / "run").train()

    items = [{"text": f"number {i} is", "choices": [" even", " odd"], "answer": i % 2} for i in range(4)]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "tiny_cloze.yaml").write_text(TASK.format(file=tmp_path / "items.jsonl"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    found = []
    for patched in (False, True):
        if patched:
            assert len(patch(model, sparse="gather").sparse) == 2
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
        manager = TaskManager(include_path=str(tmp_path / "tasks"))
        result = simple_evaluate(model=lm, tasks=["tiny_cloze"], task_manager=manager, log_samples=True)
        found.append([sample["filtered_resps"] for sample in result["samples"]["tiny_cloze"]])
    scores = [[float(score) for sample in samples for score, _ in sample] for samples in found]
    assert len(scores[0]) == 8 and scores[1] == pytest.approx(scores[0], abs=1e-4)
