"""Makes PNG files small: 256 colours are enough for screens."""

from __future__ import annotations

import base64
import struct
import zlib

from chromium import Page

# The most frequent colours stay as they are; the others are rounded until they are few enough.
_TO_COLOURS = """(async () => {
  const image = await createImageBitmap(await (await fetch("data:image/png;base64,%s")).blob());
  const canvas = new OffscreenCanvas(image.width, image.height), context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const pixels = context.getImageData(0, 0, image.width, image.height).data, counts = new Map();
  for (let i = 0; i < pixels.length; i += 4) {
    const colour = pixels[i] << 16 | pixels[i + 1] << 8 | pixels[i + 2];
    counts.set(colour, (counts.get(colour) || 0) + 1);
  }
  const ordered = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a));
  const palette = ordered.slice(0, 128), index = new Map(palette.map((colour, i) => [colour, i]));
  for (let bits = 0; ; bits++) {
    const mask = 0x010101 * (0xff >> bits << bits), bins = new Map();
    for (const colour of ordered.slice(128)) {
      if (!bins.has(colour & mask)) bins.set(colour & mask, [128 + bins.size, colour]);
      index.set(colour, bins.get(colour & mask)[0]);
    }
    if (bins.size > 128) continue;
    palette.push(...[...bins.values()].map(([, colour]) => colour));
    break;
  }
  let text = "";
  for (let i = 0; i < pixels.length; i += 4)
    text += String.fromCharCode(index.get(pixels[i] << 16 | pixels[i + 1] << 8 | pixels[i + 2]));
  return [image.width, image.height, palette, btoa(text)];
})()"""


def small_png(page: Page, png: bytes) -> bytes:
    """Returns the picture with at most 256 colours. The page, any one, does the decoding."""
    width, height, colours, text = page.run(_TO_COLOURS % base64.b64encode(png).decode())
    pixels = base64.b64decode(text)
    rows = b"".join(b"\0" + pixels[start : start + width] for start in range(0, width * height, width))
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", b"".join(colour.to_bytes(3) for colour in colours)),
        (b"IDAT", zlib.compress(rows, 9)),
        (b"IEND", b""),
    ]
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
