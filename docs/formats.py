"""Draws docs/formats.png: one matrix in three formats, as `rowsparse.pack` makes them. Run it in docs/."""

import torch
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

from gossamer import rowsparse

COLORS = ("#8ecae6", "#ffb703", "#90be6d", "#e5989b")  # one a row
dense = torch.tensor([[0, 3, 0, 0, 0, 1, 0, 0], [0] * 8, [2, 0, 0, 5, 0, 0, 7, 0], [0, 0, 0, 0, 0, 4, 0, 0]]).float()
ell = rowsparse.pack(dense, capacity=3)
csr = rowsparse.pack(dense, format="csr")
twell = rowsparse.pack(dense, format="twell", tile=4, slots=2)


def cell(axes, x, y, text, row=None):
    color = "white" if row is None else COLORS[row]
    axes.add_patch(Rectangle((x, -y), 1, -1, facecolor=color, edgecolor="black", linewidth=0.8))
    axes.text(x + 0.5, -y - 0.5, text, ha="center", va="center", fontsize=11)


def grid(axes, x, title, table, filled, color_of=lambda row, column: row):
    axes.text(x, 0.35, title, fontsize=11)
    for row, entries in enumerate(table):
        for column, entry in enumerate(entries):
            full = filled[row][column]
            cell(
                axes,
                x + column,
                row,
                f"{entry:g}" if full or entry < 0 else "",
                color_of(row, column) if full else None,
            )


figure, all_axes = plt.subplots(4, 1, figsize=(9, 9.6), height_ratios=(5, 5, 5, 5), layout="constrained")
for axes, title in zip(all_axes, ("dense, 4 x 8", "ELL, capacity 3", "CSR", "TwELL, tiles of 4 columns, 2 slots")):
    axes.set(xlim=(-0.2, 19), ylim=(-4.4, 1.9), aspect="equal")
    axes.axis("off")
    axes.text(0, 1.35, title, fontsize=13, weight="bold")
grid(all_axes[0], 0, "", dense.tolist(), (dense != 0).tolist())

held = ell.indices >= 0
grid(all_axes[1], 0, "values", ell.values.tolist(), held.tolist())
grid(all_axes[1], 4, "indices", ell.indices.tolist(), held.tolist())
grid(all_axes[1], 8, "nnz_per_row", ell.nnz_per_row[:, None].tolist(), torch.ones(4, 1).tolist())

rows = torch.repeat_interleave(csr.nnz_per_row).tolist()
for y, (title, entries) in enumerate((("values", csr.values), ("indices", csr.indices))):
    all_axes[2].text(0, -1.6 * y - 0.55, title, fontsize=11)
    for place, (entry, row) in enumerate(zip(entries.tolist(), rows)):
        cell(all_axes[2], 4 + place, 1.6 * y, f"{entry:g}", row)
all_axes[2].text(0, -3.75, "row_offsets", fontsize=11)
for place, offset in enumerate(csr.row_offsets.tolist()):
    cell(all_axes[2], 4 + place, 3.2, f"{offset}")

held = (torch.arange(2) < twell.nnz_per_tile[..., None]).flatten(1)
grid(all_axes[3], 0, "values, tile 0 | tile 1", twell.values.flatten(1).tolist(), held.tolist())
grid(all_axes[3], 7, "indices in the tile", twell.indices.flatten(1).tolist(), held.tolist())
grid(all_axes[3], 14, "nnz_per_tile", twell.nnz_per_tile.tolist(), torch.ones(4, 2).tolist())
for x in (2, 9):
    all_axes[3].plot([x, x], [0, -4], color="black", linewidth=3)
figure.savefig("formats.png", dpi=80)
