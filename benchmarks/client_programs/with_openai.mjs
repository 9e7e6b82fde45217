import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { AGENT_URL, KEY, MODEL, PICTURE, URL, cell } from "./cells.mjs";
import assert from "node:assert";

const client = new OpenAI({ baseURL: URL, apiKey: KEY });
const messages = [{ role: "user", content: [{ type: "text", text: "How many?" }, { type: "image_url", image_url: { url: PICTURE } }] }];
const Answer = z.object({ yes: z.boolean(), size: z.number().int().min(0).max(9) });

await cell("chat", async () => {
  const told = await client.chat.completions.create({ model: MODEL, messages, n: 2, max_tokens: 20, logprobs: true });
  assert(told.choices.length === 2 && told.choices[0].logprobs.content.length);
});
await cell("chat stream", async () => {
  let text = "";
  const stream = await client.chat.completions.create({ model: MODEL, messages, stream: true, stream_options: { include_usage: true }, max_tokens: 20 });
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  assert(text);
});
await cell("chat stream helper", async () => {
  const stream = client.chat.completions.stream({ model: MODEL, messages, max_tokens: 20 });
  assert((await stream.finalChatCompletion()).choices[0].message.content);
});
await cell("chat parse (zod)", async () => {
  const told = await client.chat.completions.parse({ model: MODEL, messages, response_format: zodResponseFormat(Answer, "answer"), max_tokens: 300 });
  assert(typeof told.choices[0].message.parsed.yes === "boolean");
});
await cell("tools parse (zod)", async () => {
  const told = await client.chat.completions.parse({ model: MODEL, messages, tools: [zodFunction({ name: "look", parameters: Answer })], tool_choice: "required", parallel_tool_calls: false, max_tokens: 300 });
  assert(told.choices[0].message.tool_calls[0].function.parsed_arguments.size <= 9);
});
await cell("completions, stream", async () => {
  assert((await client.completions.create({ model: MODEL, prompt: "One, two", max_tokens: 4 })).choices.length === 1);
  for await (const chunk of await client.completions.create({ model: MODEL, prompt: "One, two", max_tokens: 4, stream: true })) assert(chunk.choices);
});
await cell("responses, stream", async () => {
  const asked = { model: MODEL, input: [{ role: "user", content: [{ type: "input_text", text: "?" }, { type: "input_image", image_url: PICTURE, detail: "auto" }] }], max_output_tokens: 20 };
  assert((await client.responses.create(asked)).output.length);
  assert((await client.responses.stream(asked).finalResponse()).output.length);
});
await cell("responses parse (zod)", async () => {
  const told = await client.responses.parse({ model: MODEL, input: "?", text: { format: zodTextFormat(Answer, "answer") }, max_output_tokens: 300 });
  assert(typeof told.output_parsed.yes === "boolean");
});
const agent = new OpenAI({ baseURL: AGENT_URL, apiKey: KEY });
const tools = [{ type: "function", function: { name: "look", function: async ({ x }) => `${x} seen`, parse: JSON.parse, parameters: { type: "object", properties: { x: { type: "integer" } } } } }];
for (const stream of [false, true])
  await cell(`runTools${stream ? " streamed" : ""}`, async () => {
    const runner = agent.chat.completions.runTools({ model: "tiny", messages, tools, stream });
    assert.equal(await runner.finalContent(), "Two.");
  });
