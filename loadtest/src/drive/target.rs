//! The server under test: a client of it, and how it counts tokens.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::args::ClientArgs;
use super::client::ChatClient;
use super::conversation::ConversationSettings;
use super::costs::StepCosts;
use super::facts::RunFacts;
use super::histograms::ServerHistograms;
use super::outcome::Failure;
use super::prompt_text::{TextScale, all_words};

/// A server that has answered the probe requests.
#[derive(Clone)]
pub(super) struct TargetServer {
    /// The client that sends all requests.
    pub(super) client: Arc<ChatClient>,
    /// What all conversations with it have in common.
    pub(super) settings: Arc<ConversationSettings>,
}

impl TargetServer {
    /// Connects to the server at `url` and measures how it counts tokens.
    ///
    /// # Errors
    /// If the server cannot be reached or does not answer as an OpenAI-compatible server.
    pub(super) async fn connect(url: &str, args: &ClientArgs) -> Result<TargetServer, String> {
        let key = args.keys().first().map(|entry| entry.key.clone());
        let connect = async {
            let client = ChatClient::connect(url, args.model.clone(), key, args.options()).await?;
            let scale = measure_scale(&client).await?;
            Ok((client, scale))
        };
        let (client, scale) = connect.await.map_err(|failure: Failure| match failure {
            Failure::Connection(_) => format!(
                "{url}: {failure}. Start a server there, or give another address with --url"
            ),
            _ => format!("{url}: {failure}"),
        })?;
        Ok(TargetServer {
            client: Arc::new(client),
            settings: Arc::new(ConversationSettings {
                scale,
                exact_length: args.ignore_eos,
                slow_fraction: args.slow_fraction,
                keys: args.keys().to_vec(),
            }),
        })
    }

    /// Returns the facts of a run that starts now and sends `workload`.
    pub(super) async fn facts(&self, workload: String) -> RunFacts {
        RunFacts::now(self.client.model(), workload, &self.client.answers().await)
    }

    /// Reads the server's step costs so far from its metrics.
    pub(super) async fn step_costs(&self) -> Result<StepCosts, String> {
        let metrics = self.client.metrics().await;
        StepCosts::read(&metrics.map_err(|failure| failure.to_string())?)
    }

    /// Reads the server's latency histograms so far from its metrics.
    pub(super) async fn histograms(&self) -> Result<ServerHistograms, String> {
        let metrics = self.client.metrics().await;
        let metrics = metrics.map_err(|failure| failure.to_string())?;
        ServerHistograms::read(&metrics).map_err(|error| format!("--server-histograms: {error}"))
    }

    /// Reads the histograms once they have `ended` requests more than `before`. A server can
    /// record a request after the client has read its end. After two seconds, returns what there
    /// is.
    pub(super) async fn histograms_with(
        &self,
        before: &ServerHistograms,
        ended: u64,
    ) -> Result<ServerHistograms, String> {
        let start = Instant::now();
        loop {
            let histograms = self.histograms().await?;
            let is_late = start.elapsed() > Duration::from_secs(2);
            if histograms.ended_since(before) >= ended || is_late {
                return Ok(histograms);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Writes the server's step costs since `before` to `file`.
    pub(super) async fn write_costs(&self, before: &StepCosts, file: &Path) -> Result<(), String> {
        let costs = self.step_costs().await?.since(before)?;
        costs
            .write(file)
            .map_err(|error| format!("cannot write {}: {error}", file.display()))
    }
}

/// Measures how many tokens the server counts per word, and for the chat template.
///
/// A prompt of a word twice has one word more than a prompt of the word once. The rest of the
/// prompt is the template. A prompt of all words then gives the mean tokens of a word.
async fn measure_scale(client: &ChatClient) -> Result<TextScale, Failure> {
    let words = all_words();
    let texts = [1, 2].map(|times| [words[0]].repeat(times).join(" "));
    let [once, twice] = texts.map(|text| client.prompt_tokens(text));
    let (once, twice) = (once.await?, twice.await?);
    let template = (2 * once).saturating_sub(twice);
    let all = client.prompt_tokens(words.join(" ")).await?;
    Ok(TextScale {
        tokens_per_word: all.saturating_sub(template).max(1) as f64 / words.len() as f64,
        template_tokens: template as u32,
    })
}
