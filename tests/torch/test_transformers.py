"""Models of the library transformers as they are: tiny, random weights, with their own loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from privagrad.torch import PrivacyEngine
from privagrad.torch.guards.refusals import UnverifiedError
from tests.torch.reference import assert_same
from tests.torch.small import gradient_of

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

Rows = dict[str, Tensor]
ROWS, TOKENS = 6, 7
GENERATOR = torch.Generator().manual_seed(4)
WORDS = torch.randint(2, 23, (ROWS, TOKENS), generator=GENERATOR)
OTHER_WORDS = torch.randint(2, 23, (ROWS, 5), generator=GENERATOR)
CLASSES = torch.randint(0, 3, (ROWS,), generator=GENERATOR)
LENGTHS = torch.tensor([7, 4, 7, 2, 6, 7])
MASK = (torch.arange(TOKENS) < LENGTHS[:, None]).long()
LABELS = WORDS.masked_fill(MASK == 0, -100)
SIZES = {
    "vocab_size": 23, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 12, "max_position_embeddings": 16, "num_labels": 3,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


class Table(Dataset[Rows]):
    """Rows that are dictionaries, as tokenizers make them."""

    def __init__(self, columns: Rows) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, row: int) -> Rows:
        return {name: column[row] for name, column in self.columns.items()}


def gpt2() -> Any:
    sizes = {"vocab_size": 23, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    config = transformers.GPT2Config(
        **sizes, **ends, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config)


def bert() -> Any:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))


def answers() -> Any:
    config = transformers.BertConfig(**{**SIZES, "num_labels": 2})
    return transformers.BertForQuestionAnswering(config)


def regression() -> Any:
    config = transformers.BertConfig(**{**SIZES, "num_labels": 1})
    return transformers.BertForSequenceClassification(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=23, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def vit() -> Any:
    config = transformers.ViTConfig(**SIZES, image_size=8, patch_size=4)
    return transformers.ViTForImageClassification(config)


def adapted(model: Any, targets: list[str], task: str) -> Any:
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=targets, lora_dropout=0.0, task_type=task,
        init_lora_weights=False, fan_in_fan_out=targets == ["c_attn"],
    )  # fmt: skip
    return peft.get_peft_model(model, config)


TEXT = {"input_ids": WORDS, "attention_mask": MASK, "labels": LABELS}
CASES: dict[str, tuple[Callable[[], Any], Rows]] = {
    "gpt2": (gpt2, {"input_ids": WORDS, "labels": WORDS}),
    "gpt2 padded": (gpt2, TEXT),
    "llama padded": (llama, TEXT),
    "bert": (bert, {**TEXT, "labels": CLASSES}),
    "bert for answers": (
        answers,
        {**TEXT, "start_positions": CLASSES, "end_positions": CLASSES.flip(0)} | {"labels": MASK},
    ),
    "bert for numbers": (regression, {**TEXT, "labels": CLASSES.float()}),
    "t5": (t5, {**TEXT, "labels": OTHER_WORDS.masked_fill(OTHER_WORDS > 18, -100)}),
    "vit": (
        vit,
        {"pixel_values": torch.randn(ROWS, 3, 8, 8, generator=GENERATOR), "labels": CLASSES},
    ),
    "gpt2 with adapters": (lambda: adapted(gpt2(), ["c_attn"], "CAUSAL_LM"), TEXT),
    "llama with adapters": (lambda: adapted(llama(), ["q_proj", "v_proj"], "CAUSAL_LM"), TEXT),
    "bert with adapters": (
        lambda: adapted(bert(), ["query", "value"], "SEQ_CLS"),
        {**TEXT, "labels": CLASSES},
    ),
}
CASES["bert for answers"][1].pop("labels")


def model_of(name: str) -> tuple[nn.Module, Rows]:
    torch.manual_seed(0)
    make, columns = CASES[name]
    return make().train(), columns


def own_loss(model: Any, batch: Rows) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def looped(model: nn.Module, columns: Rows) -> tuple[float, list[Tensor]]:
    """A radius in the middle of the norms; Σ_i g_i min(1, B/‖g_i‖) / b."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms, gradients = [], []
    for i in range(ROWS):
        loss = own_loss(model, {name: column[i : i + 1] for name, column in columns.items()})
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        norms.append(float(torch.cat([g.flatten() for g in found]).norm()))
        gradients.append(found)
    radius = sorted(norms)[ROWS // 2]
    weights = [min(1.0, radius / norm) / ROWS for norm in norms]
    sums = [
        torch.stack([w * g for w, g in zip(weights, own, strict=True)]).sum(0)
        for own in zip(*gradients, strict=True)
    ]
    return radius, sums


def engine_sum(
    model: nn.Module,
    columns: Rows,
    radius: float,
    loss: Callable[[Any, Rows], Tensor] = own_loss,
    **options: Any,
) -> list[Tensor]:
    model = copy.deepcopy(model)
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0),
        data_loader=DataLoader(Table(columns), batch_size=ROWS),
        noise_multiplier=0.0,
        max_grad_norm=radius,
        poisson_sampling=False,
        **options,
    )
    for batch in loader:
        optimizer.zero_grad()
        loss(private, batch).backward()
        optimizer.step()
    return [gradient_of(p) for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_a_model_equals_the_loop(name: str) -> None:
    model, columns = model_of(name)
    radius, expected = looped(model, columns)
    assert_same(engine_sum(model, columns, radius), expected)


@pytest.mark.parametrize("name", ["gpt2 padded", "bert", "t5"])
def test_in_parts(name: str) -> None:
    model, columns = model_of(name)
    radius, expected = looped(model, columns)
    assert_same(engine_sum(model, columns, radius, max_physical_batch_size=4), expected)


@pytest.mark.parametrize("name", ["gpt2 padded", "llama padded"])
def test_activation_checkpoints(name: str) -> None:
    model: Any
    model, columns = model_of(name)
    radius, expected = looped(model, columns)
    model.config.use_cache = False
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert_same(engine_sum(model, columns, radius), expected)


def test_a_loss_of_the_logits_is_the_same() -> None:
    model, columns = model_of("gpt2 padded")
    radius, expected = looped(model, columns)

    def loss(private: Any, batch: Rows) -> Tensor:
        logits = private(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits
        return nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, 23), batch["labels"][:, 1:].reshape(-1)
        )

    assert_same(engine_sum(model, columns, radius, loss), expected)


class Texts(Dataset[Tensor]):
    """Words of different lengths."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Tensor:
        return WORDS[row, : int(LENGTHS[row])]


def padded(rows: list[Tensor], left: bool) -> Rows:
    longest = max(map(len, rows))
    pads = [(longest - len(row), 0) if left else (0, longest - len(row)) for row in rows]
    words = [nn.functional.pad(r, p, value=-1) for r, p in zip(rows, pads, strict=True)]
    mask = torch.stack(words) >= 0
    ids, labels = torch.stack(words).clamp_min(0), torch.stack(words).masked_fill(~mask, -100)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def collated_sum(model: nn.Module, radius: float, left: bool) -> list[Tensor]:
    model = copy.deepcopy(model)
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(
            Texts(), batch_size=ROWS, collate_fn=lambda rows: padded(rows, left)
        ),
        noise_multiplier=0.0,
        max_grad_norm=radius,
        poisson_sampling=False,
    )
    for batch in loader:
        optimizer.zero_grad()
        own_loss(private, batch).backward()
        optimizer.step()
    return [gradient_of(p) for p in model.parameters()]


def test_padding_to_the_longest() -> None:
    model, columns = model_of("llama padded")
    radius, expected = looped(model, columns)
    assert_same(collated_sum(model, radius, left=False), expected)


def test_left_padding_to_the_longest_is_refused() -> None:
    model, _ = model_of("gpt2 padded")
    with pytest.raises(ValueError, match="pad them on the right"):
        collated_sum(model, 1.0, left=True)


@pytest.mark.parametrize("name", ["gpt2 padded", "llama padded"])
def test_left_padding_to_one_length(name: str) -> None:
    model, columns = model_of(name)
    columns = padded([row[:n] for row, n in zip(WORDS, LENGTHS.tolist(), strict=True)], left=True)
    radius, expected = looped(model, columns)
    assert_same(engine_sum(model, columns, radius), expected)


def test_a_count_of_the_batch_is_refused() -> None:
    model, columns = model_of("gpt2 padded")

    def loss(private: Any, batch: Rows) -> Tensor:
        counted = (batch["labels"] != -100).sum()
        found: Tensor = private(**batch, num_items_in_batch=counted).loss
        return found

    with pytest.raises((UnverifiedError, ValueError), match="Expected"):
        engine_sum(model, columns, 1.0, loss)


def test_poisson_batches_may_be_empty() -> None:
    model, columns = model_of("gpt2 with adapters")
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        data_loader=DataLoader(Table(columns), batch_size=1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    sizes = set()
    for _ in range(4):
        for batch in loader:
            sizes.add(len(batch["input_ids"]))
            optimizer.zero_grad()
            own_loss(private, batch).backward()
            optimizer.step()
    assert len(engine.accountant) == 24
    assert 0 in sizes
