// The questions that an empty chat offers.

const DEMO = 'sterna-demo';
const FOR_THE_DEMO = [
  'Tell me a story.',
  'What is paging?',
  'What is the capital of France?',
  'Who are you?',
];
const FOR_ALL = [
  'Explain how a language model writes one token at a time.',
  'Write a Python function that checks whether a word is a palindrome.',
  'Compare trains and planes for a trip of 600 km, as a table.',
  'Plan a dinner for four with what is in season.',
];

/** Returns questions that suit the model. The demo model answers few others. */
export function examplesFor(model) {
  return model === DEMO ? FOR_THE_DEMO : FOR_ALL;
}
