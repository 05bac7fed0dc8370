"""TCP proxy between jobs and selasticd that can be slow or closed; runs in ctld.

    proxy.py PORT TARGET_HOST:PORT CONTROL_FILE

The file holds seconds of delay in each direction, or `cut`; it is read for every chunk.
"""

import asyncio
import sys
from pathlib import Path

port, target, control = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])


def word() -> str:
    try:
        return control.read_text().strip() or "0"
    except OSError:
        return "0"


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(65536):
            setting = word()
            if setting == "cut":
                break
            await asyncio.sleep(float(setting))
            writer.write(chunk)
            await writer.drain()
    except (OSError, ValueError):
        pass
    finally:
        writer.close()


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    host, _, number = target.partition(":")
    if word() == "cut":
        writer.close()
        return
    try:
        far_reader, far_writer = await asyncio.open_connection(host, int(number))
    except OSError:
        writer.close()
        return
    await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))


async def main() -> None:
    server = await asyncio.start_server(serve, "0.0.0.0", port)
    await server.serve_forever()


asyncio.run(main())
