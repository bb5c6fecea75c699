"""Transformer layers: equal to the equations written out, exact masks, a cache that makes any cut of a text the same.

Legend: B rows, T time, D width, C slots of the cache, H heads, K = D / H.
"""

import cmath
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, layer_norm
from torch.utils.flop_counter import FlopCounterMode

from reprise.cells.attention import TransformerLayer
from reprise.cells.config import CellConfig
from reprise.models import LanguageModel, ModelConfig
from reprise.runtime import UserError

WIDTH_IN, WIDTH, NUM_HEADS, CONTEXT = 6, 8, 2, 5


def settings(kind: str, **fields: Any) -> CellConfig:
    chosen = {"num_heads": NUM_HEADS, "context": CONTEXT} | fields
    return CellConfig(kind, coupled_gates=False, layer_norm=False, temporal_residual=False, **chosen)


def built(kind: str, *, width_in: int = WIDTH, dtype: torch.dtype = torch.float64, **fields: Any) -> TransformerLayer:
    torch.manual_seed(0)
    layer = settings(kind, **fields).build(width_in, WIDTH)
    assert isinstance(layer, TransformerLayer)
    for name, parameter in layer.named_parameters():
        if parameter.dim() == 1:
            # Not the zeros and ones of a new layer, behind which a mistake could hide.
            nn.init.normal_(parameter, mean=1.0 if name.endswith("scale") else 0.0, std=0.3)
    return layer.to(dtype)


def window(num_rows: int = 3, num_steps: int = 17, *, width_in: int = WIDTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    reset_BT = torch.zeros(num_rows, num_steps, dtype=torch.bool)
    reset_BT[1, 4], reset_BT[2, 0], reset_BT[0, 9], reset_BT[0, 10] = True, True, True, True
    return torch.randn(num_rows, num_steps, width_in, generator=generator, dtype=torch.float64), reset_BT


def model_of(kind: str, *, num_layers: int = 3, dtype: torch.dtype = torch.float64, **fields: Any) -> LanguageModel:
    torch.manual_seed(0)
    config = ModelConfig(num_layers=num_layers, width=WIDTH, cell=settings(kind), **fields)
    return config.build(vocab_size=40).to(dtype)


def tokens(num_rows: int = 3, num_steps: int = 17) -> Tensor:
    return torch.randint(40, (num_rows, num_steps), generator=torch.Generator().manual_seed(1))


def heard_by(reset_T: Tensor, t: int, *, kind: str) -> list[int]:
    """Positions that position t of one row hears, from the words of the contract."""
    documents = reset_T.cumsum(0).tolist()
    own = [s for s in range(len(documents)) if documents[s] == documents[t]]
    return own if kind == "transformer_encoder" else [s for s in own if t - CONTEXT <= s <= t]


def turned_product(query_K: Tensor, key_K: Tensor, distance: int) -> Tensor:
    """Real part of the sum of q conj(k) exp(i distance * 10000^(-2j/K)), the pairs (j, K/2 + j) taken as complex."""
    half = len(query_K) // 2
    total = torch.zeros((), dtype=query_K.dtype)
    for j in range(half):
        turn = cmath.exp(1j * distance * 10_000 ** (-j / half))
        query, key = torch.complex(query_K[j], query_K[half + j]), torch.complex(key_K[j], key_K[half + j])
        total = total + (query * key.conj() * turn).real
    return total


def plain_layer(layer: TransformerLayer, x_TE: Tensor, reset_T: Tensor, *, kind: str) -> Tensor:
    """One row, position by position and head by head, as the docstring of cells/attention.py has it: [T, D]."""
    weights = dict(layer.named_parameters())
    stream_TD = x_TE if "input_weight" not in weights else x_TE @ weights["input_weight"].T
    norm = weights["attention_norm_scale"], weights["attention_norm_shift"]
    read_TD = layer_norm(stream_TD, (WIDTH,), *norm)
    parts = (read_TD @ weights["attention_in_weight"].T + weights["attention_in_bias"]).chunk(3, dim=-1)
    query_THK, key_THK, value_THK = (part.view(len(x_TE), NUM_HEADS, -1) for part in parts)
    rows = []
    for t in range(len(x_TE)):
        heard = heard_by(reset_T, t, kind=kind)
        heads = []
        for head in range(NUM_HEADS):
            scores = [turned_product(query_THK[t, head], key_THK[s, head], t - s) for s in heard]
            weight = torch.softmax(torch.stack(scores) / math.sqrt(WIDTH / NUM_HEADS), dim=0)
            heads.append(sum((weight[i] * value_THK[s, head] for i, s in enumerate(heard)), torch.zeros(())))
        rows.append(torch.cat(heads))
    stream_TD = stream_TD + torch.stack(rows) @ weights["attention_out_weight"].T + weights["attention_out_bias"]
    read_TD = layer_norm(stream_TD, (WIDTH,), weights["mlp_norm_scale"], weights["mlp_norm_shift"])
    hidden_TF = gelu(read_TD @ weights["up_weight"].T + weights["up_bias"])
    return stream_TD + hidden_TF @ weights["down_weight"].T + weights["down_bias"]


@pytest.mark.parametrize("implementation", ["library", "reference"])
@pytest.mark.parametrize("width_in", [WIDTH, WIDTH_IN])
@pytest.mark.parametrize("kind", ["transformer", "transformer_encoder"])
def test_layer_equals_its_equations_with_all_gradients(kind: str, width_in: int, implementation: str) -> None:
    layer = built(kind, width_in=width_in, implementation=implementation)
    x_BTE, reset_BT = window(num_steps=12, width_in=width_in)
    leaves = [x_BTE.requires_grad_(), *layer.parameters()]
    weighting = torch.randn(3, 12, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected_BTD = torch.stack([plain_layer(layer, x_BTE[b], reset_BT[b], kind=kind) for b in range(3)])
    y_BTD, _ = layer(x_BTE, layer.initial_state(3), reset_BT)
    torch.testing.assert_close(y_BTD, expected_BTD, rtol=1e-11, atol=1e-12)
    found = torch.autograd.grad((y_BTD * weighting).sum(), leaves)
    expected = torch.autograd.grad((expected_BTD * weighting).sum(), leaves)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("cuts", [[1] * 17, [3, 14], [16, 1], [5, 5, 5, 2], [2, 1, 9, 5]])
def test_any_cut_of_a_text_gives_the_same_outputs_and_cache(cuts: list[int]) -> None:
    layer = built("transformer")
    x_BTE, reset_BT = window()
    y_BTD, last = layer(x_BTE, layer.initial_state(3), reset_BT)
    state, pieces, start = layer.initial_state(3), [], 0
    for length in cuts:
        part = slice(start, start + length)
        piece_BTD, state = layer(x_BTE[:, part], state, reset_BT[:, part])
        pieces.append(piece_BTD)
        start += length
    torch.testing.assert_close(torch.cat(pieces, dim=1), y_BTD, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_equal_the_whole_pass_of_a_model(dtype: torch.dtype) -> None:
    model, tokens_BT = model_of("transformer", dtype=dtype), tokens()
    whole_BTD, _ = model(tokens_BT, model.initial_state(3))
    state, pieces = model.initial_state(3), []
    for t in range(tokens_BT.shape[1]):
        piece_BTD, state = model(tokens_BT[:, t : t + 1], state)
        pieces.append(piece_BTD)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole_BTD)


@pytest.mark.parametrize("kind", ["transformer", "transformer_encoder"])
def test_other_documents_change_no_bit(kind: str) -> None:
    model, tokens_BT = model_of(kind, dtype=torch.float32), tokens()
    reset_BT = torch.zeros(3, 17, dtype=torch.bool)
    reset_BT[:, 6], reset_BT[:, 11] = True, True
    before_BT, after_BT = tokens_BT.clone(), tokens_BT.clone()
    before_BT[:, :6] = (tokens_BT[:, :6] + 1) % 40
    after_BT[:, 11:] = (tokens_BT[:, 11:] + 1) % 40
    # A cache that is not empty is another document's too.
    _, used = model(tokens_BT.flip(1), model.initial_state(3))
    whole_BTD, _ = model(tokens_BT, model.initial_state(3), reset_BT)
    for other_BT, state in ((before_BT, used), (after_BT, model.initial_state(3))):
        other_BTD, _ = model(other_BT, state, reset_BT)
        assert torch.equal(other_BTD[:, 6:11], whole_BTD[:, 6:11])
    assert not torch.equal(model(before_BT, used, reset_BT)[0][:, :6], whole_BTD[:, :6])


def test_cache_forgets_documents_that_ended() -> None:
    layer = built("transformer")
    x_BTE, _ = window()
    reset_BT = torch.zeros(3, 17, dtype=torch.bool)
    reset_BT[0, 15], reset_BT[1, 3] = True, True
    _, (keys_BCD, values_BCD, filled_B) = layer(x_BTE, layer.initial_state(3), reset_BT)
    assert filled_B.tolist() == [2, CONTEXT, CONTEXT]
    for part_BCD in (keys_BCD, values_BCD):
        assert not part_BCD[0, : CONTEXT - 2].any() and part_BCD[0, CONTEXT - 2 :].all() and part_BCD[1:].all()


def test_decoder_hears_nothing_that_comes_later() -> None:
    model, tokens_BT = model_of("transformer", dtype=torch.float32), tokens()
    changed_BT = tokens_BT.clone()
    changed_BT[:, 9:] = (tokens_BT[:, 9:] + 1) % 40
    whole_BTD, _ = model(tokens_BT, model.initial_state(3))
    changed_BTD, _ = model(changed_BT, model.initial_state(3))
    assert torch.equal(whole_BTD[:, :9], changed_BTD[:, :9])
    assert not (whole_BTD[:, 9] == changed_BTD[:, 9]).all()


@pytest.mark.parametrize("cut", [0, 6, 10])
def test_decoder_hears_exactly_as_far_back_as_the_context(cut: int) -> None:
    layer = built("transformer")
    x_BTE = window()[0].requires_grad_()
    state = layer.initial_state(3)
    if cut:
        _, state = layer(x_BTE[:, :cut], state, None)
    y_BTD, _ = layer(x_BTE[:, cut:], state, None)
    (gradient_BTE,) = torch.autograd.grad(y_BTD[:, 12 - cut].sum(), x_BTE)
    heard = gradient_BTE.abs().sum(dim=(0, 2)).nonzero()[:, 0].tolist()
    assert heard == list(range(12 - CONTEXT, 13))


def test_encoder_hears_both_sides_of_its_document_and_keeps_nothing() -> None:
    layer = built("transformer_encoder")
    x_BTE, reset_BT = window()
    y_BTD, state = layer(x_BTE.requires_grad_(), layer.initial_state(3), reset_BT)
    assert state == ()
    (gradient_BTE,) = torch.autograd.grad(y_BTD[:, 7].sum(), x_BTE)
    heard = [row.abs().sum(dim=1).nonzero()[:, 0].tolist() for row in gradient_BTE]
    assert heard == [list(range(9)), list(range(4, 17)), list(range(17))]
    with pytest.raises(UserError, match="whole windows, not steps"):
        layer.step(x_BTE[:, 0], ())


def test_encoder_documents_are_the_same_side_by_side_and_alone() -> None:
    model, tokens_BT = model_of("transformer_encoder"), tokens()
    reset_BT = torch.zeros(3, 17, dtype=torch.bool)
    reset_BT[:, 6] = True
    together_BTD, state = model(tokens_BT, model.initial_state(3), reset_BT)
    alone = [model(part_BT, model.initial_state(3))[0] for part_BT in (tokens_BT[:, :6], tokens_BT[:, 6:])]
    torch.testing.assert_close(together_BTD, torch.cat(alone, dim=1), rtol=1e-11, atol=1e-12)
    assert state == ((), (), ())


def test_masked_words_can_be_learned_from_both_sides() -> None:
    model = model_of("transformer_encoder", num_layers=2, dtype=torch.float32)
    tokens_BT, mask_id = tokens(4, 9), 0
    read_BT, targets_BT = tokens_BT.clone(), torch.full_like(tokens_BT, -100)
    read_BT[:, 4], targets_BT[:, 4] = mask_id, tokens_BT[:, 4]
    # The words before the masked one are the same in all rows: only what follows tells which it is.
    read_BT[:, :4] = read_BT[:1, :4]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(40):
        loss = model.loss_sum(model(read_BT, model.initial_state(4))[0], targets_BT)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item() / 4)
    assert losses[0] > 2.0 and losses[-1] < 0.2


@pytest.mark.parametrize("kind", ["transformer", "transformer_encoder"])
def test_stream_is_fp32_under_autocast_and_products_are_bf16(kind: str) -> None:
    layer = built(kind, dtype=torch.float32)
    x_BTE, reset_BT = window()
    exact_BTD, _ = layer(x_BTE.float(), layer.initial_state(3), reset_BT)
    with torch.autocast("cpu", torch.bfloat16):
        y_BTD, state = layer(x_BTE.float(), layer.initial_state(3), reset_BT)
    assert y_BTD.dtype == torch.float32 and all(part.dtype == torch.float32 for part in state)
    assert 1e-5 < (y_BTD - exact_BTD).norm() / exact_BTD.norm() < 2e-2
    for part in state[:2]:
        assert torch.equal(part, part.bfloat16().float())


@pytest.mark.parametrize("kind", ["transformer", "transformer_encoder"])
def test_parameters_and_start_are_those_of_the_reference_layer(kind: str) -> None:
    layer = settings(kind, num_heads=12).build(768, 768)
    theirs = nn.TransformerEncoderLayer(768, 12, 4 * 768, device="meta")
    assert sum(part.numel() for part in layer.parameters()) == sum(part.numel() for part in theirs.parameters())
    for name, shape in (("up_weight", (3072, 768)), ("attention_out_weight", (768, 768))):
        bound = math.sqrt(6 / sum(shape))
        assert 0.99 * bound < layer.get_parameter(name).abs().max().item() <= bound
    bound = math.sqrt(6 / (768 + 768))
    assert 0.99 * bound < layer.get_parameter("attention_in_weight").abs().max().item() <= bound


def test_operations_are_those_a_full_cache_takes() -> None:
    model = model_of("transformer", embedding_width=4)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.logits(model(tokens(1, 1), model.initial_state(1))[0])
    assert counter.get_total_flops() == model.flops_per_token() // 3


def test_dropout_spares_what_the_stream_carries_already() -> None:
    model, tokens_BT = model_of("transformer", dropout=0.999999), tokens()
    hidden_BTD, _ = model(tokens_BT, model.initial_state(3), None, torch.arange(3))
    embedded_BTD = model.embedding(tokens_BT) * WIDTH**0.5
    torch.testing.assert_close(hidden_BTD, layer_norm(embedded_BTD, (WIDTH,)))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_heads": 3}, "model.cell.num_heads=3: does not divide model.width=8"),
        ({"num_heads": 8}, "model.cell.num_heads=8: heads of 1 units; allowed: an even number"),
        ({"num_heads": 0}, "model.cell.num_heads=0: allowed: 1 or more"),
        ({"context": 0}, "model.cell.context=0: allowed: 1 or more"),
        ({"implementation": "eager"}, "model.cell.implementation=eager: .* allowed: auto, library, reference"),
        ({"recurrence": "block"}, "model.cell.recurrence=block: unknown; allowed: full"),
    ],
)
@pytest.mark.parametrize("kind", ["transformer", "transformer_encoder"])
def test_refuses_by_name(kind: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ModelConfig(width=8, cell=settings(kind, **fields))


def test_refuses_switches_and_a_second_residual() -> None:
    with pytest.raises(UserError, match="model.cell.layer_norm=true: a transformer has no such switch"):
        CellConfig("transformer", coupled_gates=False, temporal_residual=False)
    with pytest.raises(UserError, match="model.layer_residual=true: a transformer adds its input itself"):
        ModelConfig(width=8, layer_residual=True, cell=settings("transformer"))
