"""The two models of the GPU benchmarks by shape."""

from relay.models.config import ModelConfig, RopeConfig

LLAMA_8B = ModelConfig(
    architecture="llama", vocab=128256, hidden=4096, intermediate=14336, num_layers=32, num_heads=32, num_kv_heads=8,
    head_dim=128, rms_eps=1e-5, max_positions=8192, rope=RopeConfig(theta=500000.0), tied_embeddings=False,
)  # fmt: skip
SMOLLM2 = ModelConfig(
    architecture="llama", vocab=49152, hidden=576, intermediate=1536, num_layers=30, num_heads=9, num_kv_heads=3,
    head_dim=64, rms_eps=1e-5, max_positions=8192, rope=RopeConfig(theta=100000.0), tied_embeddings=True,
)  # fmt: skip
