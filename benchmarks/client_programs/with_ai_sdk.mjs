import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { createOpenAI } from "@ai-sdk/openai";
import assert from "node:assert";
import { z } from "zod";
import { AGENT_URL, KEY, MODEL, PICTURE, URL, cell } from "./cells.mjs";

const shared = { name: "served", apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true };
const there = createOpenAICompatible({ ...shared, baseURL: URL });
const model = there(MODEL);
const talk = createOpenAICompatible({ ...shared, baseURL: AGENT_URL })("tiny");
const messages = [{ role: "user", content: [{ type: "text", text: "How many?" }, { type: "image", image: PICTURE }] }];
const schema = z.object({ yes: z.boolean(), size: z.number().int().min(0).max(9) });
const look = tool({ description: "Look closer.", inputSchema: z.object({ x: z.number().int() }), execute: async () => "seen" });

await cell("generateText", async () => {
  const told = await generateText({ model, messages, maxOutputTokens: 20, maxRetries: 0 });
  assert(told.text && told.usage.totalTokens);
});
await cell("streamText", async () => {
  const told = streamText({ model, messages, maxOutputTokens: 20, maxRetries: 0 });
  let text = "";
  for await (const part of told.textStream) text += part;
  assert(text && (await told.usage).totalTokens);
});
await cell("generateObject", async () => {
  assert.equal(typeof (await generateObject({ model, messages, schema, maxOutputTokens: 500, maxRetries: 0 })).object.yes, "boolean");
});
await cell("generateObject without structured outputs", async () => {
  const plain = createOpenAICompatible({ name: "served", baseURL: AGENT_URL, apiKey: KEY })("tiny");
  const told = [...messages, { role: "user", content: 'Answer as {"yes": boolean, "size": integer}.' }];
  assert.equal((await generateObject({ model: plain, messages: told, schema, maxRetries: 0 })).object.yes, true);
});
await cell("streamObject", async () => {
  const told = streamObject({ model, messages, schema, maxOutputTokens: 500, maxRetries: 0 });
  for await (const part of told.partialObjectStream) assert(part);
  assert.equal(typeof (await told.object).yes, "boolean");
});
await cell("Output.object", async () => {
  const told = await generateText({ model, messages, output: Output.object({ schema }), maxOutputTokens: 500, maxRetries: 0 });
  assert.equal(typeof told.output.yes, "boolean");
});
await cell("tools required, named", async () => {
  for (const toolChoice of ["required", { type: "tool", toolName: "look" }]) {
    const told = await generateText({ model, messages, tools: { look }, toolChoice, maxOutputTokens: 500, maxRetries: 0 });
    assert.equal(told.toolCalls[0].toolName, "look");
  }
});
await cell("tools in a loop, streamed", async () => {
  const asked = { model: talk, messages, tools: { look }, stopWhen: stepCountIs(3), maxRetries: 0 };
  assert.equal((await generateText(asked)).text, "Two.");
  const told = streamText(asked);
  await told.consumeStream();
  assert.equal(await told.text, "Two.");
});
await cell("tools, then Output.object", async () => {
  const asked = { model: talk, messages, tools: { look }, stopWhen: stepCountIs(3), maxRetries: 0 };
  const told = await generateText({ ...asked, output: Output.object({ schema }) });
  assert(told.steps.length === 2 && told.output.yes === true);
});
await cell("completionModel", async () => {
  const told = await generateText({ model: there.completionModel(MODEL), prompt: "One, two", maxOutputTokens: 10, maxRetries: 0 });
  assert(told.finishReason);
});
await cell("@ai-sdk/openai: responses, tools in a loop", async () => {
  const responses = createOpenAI({ baseURL: AGENT_URL, apiKey: KEY }).responses("tiny");
  const asked = { model: responses, messages, tools: { look }, stopWhen: stepCountIs(3), maxRetries: 0 };
  assert.equal((await generateText(asked)).text, "Two.");
  assert.equal(await streamText(asked).text, "Two.");
});
