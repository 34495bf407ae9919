"""generate_text: draws against their definition, and text from checkpoints of any layout equal to the model's own."""

import random

import pytest
import torch

from megatron.checkpoint.pieces import parameter_piece
from megatron.checkpoint.save import save_checkpoint
from megatron.config.run import RunConfig
from megatron.config.stored import to_dict
from megatron.distributed.context import single_process_context
from megatron.models.gpt import build_stages
from megatron.topology.mesh import Mesh
from tests.helpers.ranks import run_ranks
from tools.generate_text import choose, generate, main

SIZES = "--num-layers 4 --hidden-size 32 --num-attention-heads 4"
MODELS = {
    "gpt2": f"{SIZES} --position-embedding-type learned_absolute",
    "variant": f"{SIZES} --quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 2 --window-size 4,0 "
    "--window-attn-skip-freq [1,0]*2 --position-embedding-type rope --no-rope-freq 2",
    "llama": f"{SIZES} --group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights",
}
COMMON = (
    "--seq-length 48 --max-position-embeddings 48 --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr 1e-3 "
    "--mock-data --tokenizer-type ByteTokenizer --make-vocab-size-divisible-by 16 --init-method-std 0.3"
)


def draws(count, *options):
    generator = torch.Generator().manual_seed(0)
    return torch.tensor([choose(*options, generator) for _ in range(count)])


def test_temperature_zero_is_the_likeliest():
    assert choose(torch.tensor([0.1, 3.0, 2.9]), 0.0, 0, 1.0, None) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0])
    found = torch.bincount(draws(4000, logits, temperature, 0, 1.0), minlength=4) / 4000
    # Four standard deviations of a frequency of 4,000 draws.
    assert torch.allclose(found, torch.softmax(logits / temperature, 0), atol=0.032)


def test_top_k_and_top_p_leave_the_likeliest():
    logits = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))
    assert set(draws(300, logits, 1.0, 2, 1.0).tolist()) == {1, 3}
    assert set(draws(300, logits, 1.0, 0, 0.65).tolist()) == {1, 3}  # 0.4 + 0.3 reaches 0.65
    assert set(draws(300, logits, 1.0, 0, 0.75).tolist()) == {1, 3, 2}
    assert set(draws(300, logits, 1.0, 0, 1e-6).tolist()) == {1}  # never none
    assert set(draws(300, logits, 1.0, 3, 0.5).tolist()) == {1, 3}  # of the three, 0.4 / 0.9 does not reach 0.5


def successor(calls):
    """A model of 8 real tokens and 2 of padding that counts upwards; padding always has the highest logit."""

    def logits(tokens):
        calls.append(tokens.clone())
        out = torch.nn.functional.one_hot((tokens + 1) % 8, 10).float()
        out[..., 8:] = 9.0
        return out

    return logits


def test_generation_stops_at_eod_each_prompt_for_itself():
    calls = []
    options = {"max_new_tokens": 5, "context": 100, "vocab_size": 8, "eod": 7}
    assert generate(successor(calls), [[4], [0, 1], [5, 6]], **options) == [[5, 6], [2, 3, 4, 5, 6], []]
    assert len(calls) == 5 and len(calls[0]) == 3 and len(calls[-1]) == 1


def test_the_context_slides():
    calls = []
    generate(successor(calls), [[0, 1, 2]], max_new_tokens=4, context=4, vocab_size=8, eod=-1)
    assert [call.tolist() for call in calls] == [[[0, 1, 2]], [[0, 1, 2, 3]], [[1, 2, 3, 4]], [[2, 3, 4, 5]]]


def test_a_prompt_draws_alike_in_any_company():
    def flat(tokens):
        return torch.zeros(*tokens.shape, 50)

    options = {"max_new_tokens": 10, "context": 20, "vocab_size": 50, "eod": -1, "temperature": 1.0}
    alone = generate(flat, [[1]], seed=5, **options)
    assert (
        generate(flat, [[1], [2, 3]], seed=5, **options)[0] == alone[0] != generate(flat, [[1]], seed=6, **options)[0]
    )


# ---- with real models


def save_model(directory, family, mesh, dtype=torch.float32, more=""):
    """A checkpoint of a freshly initialised model, from all ranks of `mesh`."""
    flags = f"{MODELS[family]} {COMMON} --tensor-model-parallel-size {mesh.tp} --pipeline-model-parallel-size {mesh.pp}"
    flags += more

    def save(ctx):
        config = RunConfig.from_flags(flags, world_size=mesh.world_size)
        stages = build_stages(config, ctx, 257)
        parameters = dict.fromkeys(p for stage in stages for p in stage.parameters())
        pieces = [parameter_piece(p.spec, ctx.mesh, ctx.coords, p) for p in parameters]
        save_checkpoint(directory, 2, ctx, pieces, scalars={}, config=to_dict(config))

    run_ranks(mesh.world_size, save, mesh=mesh, params_dtype=dtype)
    return flags


def greedy(flags, dtype, prompt, count):
    """The definition: the likeliest next byte of the whole text so far, one forward pass at a time."""
    config = RunConfig.from_flags(flags)
    stage = build_stages(config, single_process_context(params_dtype=dtype), 257)[0].eval()
    ids = list(prompt.encode())
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.tensor([ids])
            batch = {
                "tokens": tokens,
                "position_ids": torch.arange(len(ids))[None],
                "sample_ids": torch.zeros(1, dtype=torch.int64),
            }
            ids.append(int(stage.logits(None, batch)[0, -1, :257].argmax()))
            if ids[-1] == 256:
                ids.pop()
                break
    return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    "family, mesh", [("gpt2", Mesh(tp=2, pp=2)), ("llama", Mesh(pp=4)), ("llama", Mesh(tp=4)), ("variant", Mesh(pp=2))]
)
def test_a_checkpoint_of_any_layout_gives_the_models_own_text(tmp_path, capsys, family, mesh):
    save_model(tmp_path, family, mesh)
    expected = greedy(f"{MODELS[family]} {COMMON}", torch.float32, "def f(", 12)
    assert main(["--load", str(tmp_path), "--prompt", "def f(", "--max-new-tokens", "12"]) == 0
    assert capsys.readouterr().out == expected + "\n"


@pytest.mark.parametrize("more", [" --bf16", " --bf16 --fp32-residual-connection"])
def test_precision_is_that_of_the_checkpoint(tmp_path, capsys, more):
    save_model(tmp_path, "llama", Mesh(), torch.bfloat16, more)
    expected = greedy(f"{MODELS['llama']} {COMMON}{more}", torch.bfloat16, "import ", 12)
    assert main(["--load", str(tmp_path), "--prompt", "import ", "--max-new-tokens", "12"]) == 0
    assert capsys.readouterr().out == expected + "\n"
    assert main(["--load", str(tmp_path), "--prompt", "import ", "--dtype", "fp32"]) == 0


def test_several_prompts_a_file_and_more_tokens_than_positions(tmp_path, capsys):
    save_model(tmp_path / "ckpt", "gpt2", Mesh())
    (tmp_path / "prompts.txt").write_text("one\n" + "long " * 20 + "\n")
    command = ["--load", str(tmp_path / "ckpt"), "--prompt", "", "--prompt-file", str(tmp_path / "prompts.txt")]
    command += ["--max-new-tokens", "60", "--temperature", "0.7", "--top-k", "40", "--top-p", "0.9"]
    assert main([*command, "--seed", "3"]) == 0
    first = capsys.readouterr().out
    assert "--- 1 of 3 ---" in first and "--- 3 of 3 ---\nlong long" in first
    assert main([*command, "--seed", "3"]) == 0 and capsys.readouterr().out == first
    assert main([*command, "--seed", "4"]) == 0 and capsys.readouterr().out != first


@pytest.mark.parametrize(
    "options, words",
    [
        (["--prompt", "x", "--temperature", "-1"], "--temperature -1.0 is negative"),
        (["--prompt", "x", "--temperature", "1", "--top-p", "0"], "--top-p 0.0 is not above 0"),
        (["--prompt", "x", "--temperature", "1", "--top-k", "-2"], "--top-k -2 is negative"),
        (["--prompt", "x", "--top-k", "5"], "--temperature 0 draws nothing"),
        (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["--prompt", "x", "--temperature", "nan"], "--temperature nan is not a finite number"),
        (["--prompt", "x", "--seed", str(2**63)], "--seed 9223372036854775808 is not between"),
        (["--prompt-file", "/nowhere/p"], "--prompt-file /nowhere/p: No such file"),
        (["--prompt-file", "/dev/null"], "--prompt-file /dev/null is empty"),
        ([], "nothing to continue"),
        (["--prompt", "x"], "no such directory"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, options, words):
    assert main(["--load", str(tmp_path / "typo"), *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1


def test_a_prompt_that_is_no_text_is_one_line(tmp_path, capsys):
    save_model(tmp_path, "gpt2", Mesh())
    assert main(["--load", str(tmp_path), "--prompt", "a\udcff"]) == 1
    assert capsys.readouterr().err == "error: --prompt 'a\\udcff' is not UTF-8\n"


def test_random_top_p_keeps_the_fewest_that_reach_it():
    rng = random.Random(0)
    for _ in range(20):
        logits = torch.randn(12, generator=torch.Generator().manual_seed(rng.randrange(10**6))) * 2
        top_p = rng.uniform(0.05, 0.95)
        ordered = torch.softmax(logits, 0).sort(descending=True)
        needed = next(n for n in range(1, 13) if ordered.values[:n].sum() >= top_p)
        allowed = set(ordered.indices[:needed].tolist())
        assert set(draws(200, logits, 1.0, 0, top_p).tolist()) <= allowed
