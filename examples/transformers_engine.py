"""An engine of one's own: transformers' `generate` samples, groupwise learns.

    groupwise train configs/tiny.toml --run runs/theirs steps=2 \
        engine.backend=examples/transformers_engine.py:TransformersEngine

It keeps a copy of the policy, loaded from the folder that the run publishes, as an inference
server would. Its arithmetic is not the learner's: `mismatch/` in the metrics says how far their
log-probabilities are apart. Copy this file to begin with, and change `sync` and `_write`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from groupwise import BatchEngine, Capabilities
from groupwise.engine.backends import EngineSetup
from groupwise.engine.protocol import Finish, Request, Sampling
from groupwise.engine.randomness import key
from groupwise.engine.stopping import watch_of
from groupwise.records import Completion

logging.disable_progress_bar()  # of every load: the run has a display of its own


class TransformersEngine(BatchEngine):
    """An engine that samples one request at a time, all its completions together."""

    # Weights of its own under that name; random numbers from a request's name alone, so that a run
    # that is continued samples what it would have sampled.
    capabilities = Capabilities(weights="transformers", own_randomness=False)

    def __init__(self, setup: EngineSetup) -> None:
        self.setup, self.tokenizer = setup, setup.loaded.tokenizer
        self.sync(0)

    def sync(self, version: int) -> None:
        """Take the policy's weights as they are now, by way of a folder."""
        head = self.setup.loaded.model.head_weight
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "policy"
            self.setup.publish(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=head.dtype)
        self.model = model.to(head.device).eval()
        super().sync(version)

    def answer(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return [self._write(request, sampling) for request in requests]

    @torch.no_grad()
    def _write(self, request: Request, sampling: Sampling) -> list[Completion]:
        drawn = sampling.temperature > 0
        how = {"temperature": sampling.temperature, "top_p": sampling.top_p} if drawn else {}
        prompt_NT = torch.tensor([request.prompt], device=self.model.device)
        devices = [prompt_NT.device] if prompt_NT.is_cuda else []
        with torch.random.fork_rng(devices):  # the learner's own numbers stay as they are
            torch.manual_seed(self._seed(request))
            made = self.model.generate(
                prompt_NT,
                attention_mask=torch.ones_like(prompt_NT),
                do_sample=drawn,
                num_return_sequences=request.samples if drawn else 1,
                max_new_tokens=request.most(sampling),
                min_new_tokens=request.least(sampling) or None,
                top_k=sampling.top_k if drawn else None,  # 0: all; left out, it would be 50
                eos_token_id=list(self.tokenizer.eos_ids) or None,
                pad_token_id=self.tokenizer.pad_id,
                return_dict_in_generate=True,
                output_scores=True,
                **how,
            )
        # Scores are what it drew from: divided by the temperature, narrowed by top-k and top-p.
        score_NTV = torch.stack(made.scores, dim=1).float()
        token_NT = made.sequences[:, prompt_NT.shape[1] :]
        logp_NT = score_NTV.log_softmax(-1).gather(-1, token_NT[..., None])[..., 0].cpu()
        rows = zip(token_NT.tolist(), logp_NT, strict=True)
        found = [self._completion(row, logp_T, request, sampling) for row, logp_T in rows]
        return found if drawn else found * request.samples  # greedy ones are all the same

    def _seed(self, request: Request) -> int:
        named = (request.stream, request.prompt_id, request.draw)
        return key(self.setup.seed, *named, sample=0)[0]

    def _completion(
        self, row: Sequence[int], logp_T: Tensor, request: Request, sampling: Sampling
    ) -> Completion:
        """Cut a row where it ended: others of its group may have gone on."""
        watch = watch_of(self.tokenizer, sampling.stop, request.begun_ids)
        length: int = len(row)
        finish: Finish = "length"
        for count, token in enumerate(row, 1):
            stopped = watch is not None and watch.push(token)
            if token in self.tokenizer.eos_ids:
                length, finish = count, "eos"
                break
            if stopped and count >= request.least(sampling):
                length, finish = count, "stop"
                break
        return Completion(
            token_ids=tuple(row[:length]),
            logp_T=logp_T[:length].clone(),
            finish=finish,
            version=self.version,
            weights=self.capabilities.weights,
        )
