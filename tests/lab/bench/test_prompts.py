from __future__ import annotations

import gzip
import itertools
import json
from types import SimpleNamespace as Bag

import pytest

from vllm_hwplugin_lab.bench._serving_load import prompt_ids
from vllm_hwplugin_lab.bench.serve import PromptsUnreadable, arrivals, read_prompts

RECORDS = [
    {"question_id": 81, "category": "writing", "turns": ["First turn", "Second turn"]},
    {"question": "How many?", "answer": "#### 2"},
    {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "", "entry_point": "f"},
    {"instruction": "Translate.", "input": "A cat", "output": "-"},
    {"instruction": "Name three.", "input": "", "output": "-"},
]
PROMPTS = ["First turn", "How many?", "def f():\n", "Translate.\n\nA cat", "Name three."]


@pytest.mark.parametrize("form", ["lines", "array", "packed"])
def test_the_files_of_known_sets(tmp_path, form):
    file = tmp_path / ("p.jsonl.gz" if form == "packed" else "p.jsonl")
    text = json.dumps(RECORDS) if form == "array" else "\n\n".join(map(json.dumps, RECORDS)) + "\n"
    if form == "packed":
        file.write_bytes(gzip.compress(text.encode()))
    else:
        file.write_text(text)
    assert read_prompts(file, 99) == PROMPTS
    assert read_prompts(file, 2) == PROMPTS[:2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prompt": "a"}\n{"text": "b", "id": 1}\n', r"p\.jsonl, line 2: no text under .*found text, id"),
        ('{"turns": []}', "line 1: no text under"),
        ('{"prompt": "a"}\nnot\n', "no JSON"),
        ('["a"]', "entry 1: no text under .*found str"),
        ("\n", "holds no prompt"),
    ],
)
def test_a_file_of_something_else_is_named_with_the_place(tmp_path, text, said):
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(PromptsUnreadable, match=said):
        read_prompts(file, 9)


def test_arrivals_come_at_the_rate_and_alike_for_every_side():
    times = arrivals(4000, 20.0, seed=3)
    assert times == arrivals(4000, 20.0, seed=3) != arrivals(4000, 20.0, seed=4)
    assert times[0] == 0.0
    assert times == sorted(times)
    # Not only in the long run.
    for count in (2, 16, 4000):
        assert arrivals(count, 20.0, seed=3)[-1] == pytest.approx((count - 1) / 20)
    assert arrivals(1, 20.0, seed=3) == [0.0]
    # As often as not within ln 2 of the mean gap: not a clock's beat.
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert sum(gap < 0.6931 / 20 for gap in gaps) / len(gaps) == pytest.approx(0.5, abs=0.03)
    assert arrivals(3, None, seed=3) == [0.0, 0.0, 0.0]


def load(prompts, **more):
    return {"requests": [{"prompt": one} for one in prompts], "seed": 5, "chat": True, **more}


def test_random_prompts_have_their_length_and_are_those_of_the_seed():
    model = Bag(get_vocab_size=lambda: 50)
    one, other = prompt_ids(model, load([700, 3]))
    assert (len(one), len(other)) == (700, 3)
    assert {min(one), max(one)} == {1, 49}
    assert prompt_ids(model, load([700, 3])) == [one, other] != prompt_ids(model, load([700, 3], seed=6))


def test_texts_go_through_the_models_template_once(request, tmp_path):
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    target = request.config.rootpath / "tests" / "assets" / "small" / "target"
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.add_special_tokens(["<begin>"])
    begin = tokenizer.token_to_id("<begin>")
    # As Llama's: the tokenizer puts it in front, and so does the template.
    tokenizer.post_processor = TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", begin)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = json.loads((target / "tokenizer_config.json").read_text())
    template = "{{ bos_token }}" + options["chat_template"]
    told = {**options, "bos_token": "<begin>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    model = Bag(tokenizer=str(tmp_path))
    (chat,), (plain,) = (prompt_ids(model, load(["the dog"], chat=chat)) for chat in (True, False))
    assert (plain[0], plain.count(begin)) == (begin, 1)
    # The checkpoint's template is the message and a line break.
    assert chat[: len(plain)] == plain
    assert len(chat) == len(plain) + 1
