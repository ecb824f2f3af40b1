"""Trains a small GPT-2 by transformers.Trainer, on a text that it learns by heart.

hvd-order run -np 2 python examples/transformers_trainer.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import hvd_order.torch as hvd

hvd.init()
torch.manual_seed(0)
text = "the gradient that is read first is sent first; "
tokens = torch.tensor(list((text * 40).encode())).unfold(0, 32, 3)
data = [{"input_ids": row, "labels": row} for row in tokens]

model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2))
optimizer = hvd.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=3e-3), model.named_parameters()
)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=8,
    num_train_epochs=3,
    max_grad_norm=0,  # clipping reads all gradients in every step, which leaves no overlap
    lr_scheduler_type="constant",
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
# The model is not to be wrapped in DDP, since the optimizer averages the gradients.
trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
trainer.train()
loss = trainer.evaluate(data[:8])["eval_loss"]
if hvd.rank() == 0:
    print(f"{hvd.size()} ranks, loss {loss:.3f}", flush=True)
