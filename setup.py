"""Package metadata. The core needs few libraries; everything else is an extra, asked for by the flag that uses it."""

from pathlib import Path

from setuptools import find_packages, setup

CORE = [
    "torch>=2.6",
    "numpy>=1.26",
    "sentencepiece>=0.2",  # the default tokenizer
    "tensorboard>=2.14",
    "pyyaml>=6.0",  # --config run.yaml
    "tqdm>=4.60",  # progress bars
]

EXTRAS = {
    "gpu": ["transformer-engine[pytorch]"],
    "hf": ["tokenizers>=0.20", "transformers>=4.46", "safetensors>=0.4"],
    "tiktoken": ["tiktoken>=0.7"],
    "plot": ["matplotlib>=3.8"],
    "wandb": ["wandb>=0.16"],
}
EXTRAS["dev"] = ["pytest>=8", "hypothesis>=6", "ruff>=0.6", *EXTRAS["hf"], *EXTRAS["tiktoken"], *EXTRAS["plot"]]

setup(
    name="megatron-style-pretraining",
    version="0.1.0",
    description="Megatron-style LLM pretraining with hand-written tensor, pipeline and data parallelism",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["megatron", "megatron.*"]),
    install_requires=CORE,
    extras_require=EXTRAS,
)
