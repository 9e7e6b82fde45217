"""`http`: what `rl-vlm serve` listens on and refuses."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from rl_vlm.config.section import Section


class HTTPSection(Section):
    """`rl-vlm serve`: where it listens and what it refuses."""

    host: str = Field("127.0.0.1", min_length=1, description="Beyond loopback a token is required.")
    port: int = Field(8000, ge=0, le=65535, description="0: any free port.")
    model_name: str | None = Field(
        None, min_length=1, description="What clients call the model; null: as it was given."
    )
    max_body_mib: float = Field(32.0, gt=0, description="One request's body, enforced while it is read.")
    max_images: int = Field(16, ge=0, description="Per request.")
    max_image_mib: float = Field(10.0, gt=0, description="One image's file.")
    max_image_pixels: int = Field(16_777_216, ge=1, description="One image; its header is read before it is decoded.")
    max_request_pixels: int = Field(
        201_326_592, ge=1, description="All images of a request; 16 photos of 12 megapixels fit."
    )
    max_text_chars: int = Field(200_000, ge=1, description="All texts of a request; its tokens: serving.max_context.")
    max_parts: int = Field(1024, ge=1, description="Messages and their parts in one request.")
    max_new_tokens: int = Field(2048, ge=1, description="Per sample; also the default where a client names none.")
    max_samples: int = Field(64, ge=1, description="`n` of one request.")
    max_reply_values: int = Field(
        100_000, ge=1, description="Log-probabilities of a reply: n x max_tokens x (1 + top_logprobs)."
    )
    max_queue: int = Field(
        256, ge=1, description="Requests at a time, waiting and running; more are told to come back."
    )
    max_connections: int | None = Field(
        None,
        ge=1,
        description="At a time; null: four times max_queue, at least 1024. Fewer where descriptors are short.",
    )
    max_connections_per_peer: int | None = Field(
        None, ge=1, description="Of one address (IPv6: network of 64 bits); null: three quarters of all."
    )
    headers_s: float = Field(10.0, gt=0, description="Until the headers of a request are complete, on any connection.")
    deadline_s: float = Field(300.0, gt=0, description="Of one request, from its first byte to its last token.")
    drain_s: float = Field(30.0, ge=0, description="How long running requests may go on after SIGTERM.")
    resize_min_pixels: int | None = Field(
        None, ge=1, description="Images are enlarged to this; null: as the model does."
    )
    resize_max_pixels: int | None = Field(None, ge=1, description="Images are shrunk to this; null: as the model does.")

    def problems(self) -> Iterator[str]:
        """Images that would be enlarged beyond what they are shrunk to."""
        low, high = self.resize_min_pixels, self.resize_max_pixels
        if low and high and low > high:
            yield f"http.resize_min_pixels ({low}) exceeds http.resize_max_pixels ({high}): change one of them"
