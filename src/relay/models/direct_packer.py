"""Writes a direct pack: of matrices only what they are and where they lie, after every byte of them has been read once."""

from pathlib import Path

from relay.kernels.model_files import FileMatrix, FilePart, ModelFile
from relay.models.layout import MatrixItem, VectorItem, weight_items
from relay.models.packer import PackWriter, not_finite, written, wrong_shape
from relay.models.progress import NoProgress, Progress
from relay.models.references import Places, Reference, Rows, read_whole
from relay.models.safetensors_source import SafetensorsSource


def write_direct_pack(
    source: SafetensorsSource, path: Path, *, progress: Progress | None = None, label: str = "reading"
) -> None:
    """As ``write_pack``, with ``storage`` "direct". Raises CorruptModelError from the source."""
    progress = progress or NoProgress()
    items = weight_items(source.config)
    matrices: list[MatrixItem] = [item for item in items if isinstance(item, MatrixItem)]
    files: dict[str, ModelFile] = {}
    found = [_matrix(source, item, files) for item in matrices]
    progress.start(label, sum(matrix.part_bytes(part) for matrix in found for part in matrix.parts))
    reads = read_whole(found, progress.advance)
    progress.finish()
    references = []
    for item, matrix, results in zip(matrices, found, reads, strict=True):
        for name, result in zip(item.parts, results, strict=True):
            if not result.finite:
                raise not_finite(source, name)
        rows = zip(matrix.parts, results, strict=True)
        parts = tuple(Rows(part.rows, part.encoding.name, result.digest) for part, result in rows)
        references.append(Reference(item.name, item.k, parts))
    order = list(files.values())
    places = {
        item.name: tuple((order.index(part.file), part.offset) for part in matrix.parts)
        for item, matrix in zip(matrices, found, strict=True)
    }
    with written(path) as file:
        writer = PackWriter(file, "direct")
        for vector in items:
            if isinstance(vector, VectorItem):
                writer.weights(source, vector)
        writer.finish(source, tuple(references), Places(tuple(order), places))


def _matrix(source: SafetensorsSource, item: MatrixItem, files: dict[str, ModelFile]) -> FileMatrix:
    """Where ``item`` lies; ``files`` gathers what is known of the files."""
    parts = []
    for name, rows in zip(item.parts, item.rows, strict=True):
        place = source.place(name)
        if place.shape != (rows, item.k):
            raise wrong_shape(source, name, list(place.shape), [rows, item.k])
        where = str(place.path.absolute())
        if where not in files:
            files[where] = ModelFile.now(Path(where))
        parts.append(FilePart(files[where], place.offset, rows, place.encoding))
    return FileMatrix(item.k, tuple(parts))
