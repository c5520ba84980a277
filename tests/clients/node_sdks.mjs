// Checks a running server of the demo model through two SDKs of Node: the OpenAI SDK, and Vercel's
// AI SDK with its client for compatible servers. Prints one line per check, then the totals.
import assert from "node:assert/strict";
import OpenAI, { BadRequestError, NotFoundError } from "openai";
import { APICallError, Output, generateText, streamText } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";

const baseURL = process.argv[2] + "/v1";
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const provider = createOpenAICompatible({
  name: "sterna",
  baseURL,
  supportsStructuredOutputs: true,
});
const model = provider("default");
const prompt = "What is the capital of France?";
const messages = [{ role: "user", content: prompt }];
const sampling = { model: "default", messages, temperature: 0, max_tokens: 24 };
const schema = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 12 },
    count: { type: "integer", minimum: 0, maximum: 99 },
  },
  required: ["name", "count"],
  additionalProperties: false,
};

async function openaiStreamsTheSameText() {
  const whole = await client.chat.completions.create(sampling);
  const text = whole.choices[0].message.content;
  assert.match(text, /Paris/);
  const stream = await client.chat.completions.create({
    ...sampling,
    stream: true,
    stream_options: { include_usage: true },
  });
  let [streamed, usage] = ["", null];
  for await (const chunk of stream) {
    streamed += chunk.choices[0]?.delta.content ?? "";
    usage ??= chunk.usage;
  }
  assert.equal(streamed, text);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
}

async function openaiLeavesAStreamEarly() {
  const stream = await client.chat.completions.create({
    ...sampling,
    max_tokens: 400,
    stream: true,
  });
  for await (const chunk of stream) {
    if (chunk.choices[0]?.delta.content) break;
  }
  assert.ok(stream.controller.signal.aborted);
}

async function openaiFollowsASchema() {
  const answer = await client.chat.completions.create({
    ...sampling,
    max_tokens: 200,
    response_format: { type: "json_schema", json_schema: { name: "n", strict: true, schema } },
  });
  const value = JSON.parse(answer.choices[0].message.content);
  assert.deepEqual(Object.keys(value), ["name", "count"]);
  assert.ok(Number.isInteger(value.count));
}

async function openaiErrorsAreTyped() {
  const isBad = (error) =>
    error instanceof BadRequestError && error.param === "temperature" && error.status === 400;
  await assert.rejects(client.chat.completions.create({ ...sampling, temperature: 9 }), isBad);
  const isMissing = (error) =>
    error instanceof NotFoundError && error.code === "model_not_found";
  await assert.rejects(client.chat.completions.create({ ...sampling, model: "x" }), isMissing);
}

async function openaiScoresAPrompt() {
  const answer = await client.completions.create({
    model: "default",
    prompt,
    echo: true,
    logprobs: 1,
    max_tokens: 0,
  });
  const { text, logprobs } = answer.choices[0];
  assert.equal(text, prompt);
  assert.equal(logprobs.token_logprobs.length, answer.usage.prompt_tokens);
  assert.equal(logprobs.token_logprobs[0], null);
}

async function aiStreamsTheSameText() {
  const options = { model, prompt, temperature: 0, maxOutputTokens: 24 };
  const { text, usage, finishReason } = await generateText(options);
  assert.match(text, /Paris/);
  assert.equal(finishReason, "stop");
  assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0);
  const stream = streamText(options);
  let streamed = "";
  for await (const part of stream.textStream) streamed += part;
  assert.equal(streamed, text);
}

async function aiGetsAnObject() {
  const { output } = await generateText({
    model,
    prompt,
    temperature: 0,
    maxOutputTokens: 200,
    output: Output.object({
      schema: z.object({ name: z.string().max(12), count: z.int().min(0).max(99) }),
    }),
  });
  assert.deepEqual(Object.keys(output), ["name", "count"]);
}

async function aiErrorsHaveTheStatus() {
  const call = generateText({ model, prompt, temperature: 9, maxRetries: 0 });
  const isBad = (error) => APICallError.isInstance(error) && error.statusCode === 400;
  await assert.rejects(call, isBad);
}

let failures = 0;
const checks = [
  openaiStreamsTheSameText,
  openaiLeavesAStreamEarly,
  openaiFollowsASchema,
  openaiErrorsAreTyped,
  openaiScoresAPrompt,
  aiStreamsTheSameText,
  aiGetsAnObject,
  aiErrorsHaveTheStatus,
];
for (const check of checks) {
  const name = check.name.replace(/([A-Z])/g, (letter) => " " + letter.toLowerCase());
  try {
    await check();
    console.log(`ok   ${name}`);
  } catch (error) {
    failures += 1;
    console.log(`FAIL ${name}: ${error.stack}`);
  }
}
console.log(`Node SDKs: ${checks.length - failures} passed, ${failures} failed`);
process.exit(failures > 0 ? 1 : 0);
