"""The layer sink of one step: tells the transport which positions of which transfer are in the blocks."""

from relay.transfer.contract import Transport
from relay.worker.commands import SinkRow


class TransferSink:
    """Implements ``LayerSink`` for the rows of one step that are streamed; other rows are ignored. Never blocks."""

    def __init__(self, transport: Transport, num_layers: int, rows: dict[int, SinkRow]) -> None:
        self._transport = transport
        self._num_layers = num_layers
        self._rows = rows

    def layer_written(self, layer: int, row: int) -> None:
        sink = self._rows.get(row)
        if sink is None:
            return
        if layer == 0 and sink.gap < sink.first:  # cached or copied positions: every layer of them is there already
            for cached in range(self._num_layers):
                self._announce(sink, cached, sink.gap, sink.first - sink.gap)
        self._announce(sink, layer, sink.first, sink.count)

    def _announce(self, sink: SinkRow, layer: int, first: int, count: int) -> None:
        self._transport.layer_written(sink.transfer, layer, first, count, sink.block_table)
