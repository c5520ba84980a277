//! The sessions of a workload in the order in which they begin.

use super::random::Zipf;
use super::{Arrivals, Class, Rng, Session, Workload};

/// Sessions in the order of their begin, without end unless the requests are counted.
#[derive(Debug)]
pub(crate) struct Trace {
    sources: Vec<Source>,
    requests_left: u64,
    seconds: f64,
}

/// The sessions of one class.
#[derive(Debug)]
struct Source {
    class: Class,
    place: usize,
    seed: u64,
    rate: f64, // Sessions a second, on average.
    rng: Rng,
    zipf: Zipf,
    index: u64,
    at: f64,
    is_burst: bool,
    phase_ends: f64,
}

impl Trace {
    /// The sessions of `seed` that begin at `rate` a second over all classes: as many as make `requests` turns, and
    /// none after `seconds`.
    pub(crate) fn new(
        workload: &Workload,
        seed: u64,
        rate: f64,
        requests: u64,
        seconds: f64,
    ) -> Trace {
        let shares: f64 = workload.classes.iter().map(|class| class.share).sum();
        let source = |(place, class): (usize, &Class)| {
            Source::new(class, (seed, place), rate * class.share / shares)
        };
        Trace {
            sources: workload.classes.iter().enumerate().map(source).collect(),
            requests_left: requests,
            seconds,
        }
    }
}

impl Iterator for Trace {
    type Item = Session;

    fn next(&mut self) -> Option<Session> {
        let earlier = |a: &&mut Source, b: &&mut Source| a.at.total_cmp(&b.at);
        let source = self.sources.iter_mut().min_by(earlier)?;
        if self.requests_left == 0 || source.at > self.seconds {
            return None;
        }
        let mut session = source.next();
        let turns = self.requests_left.min(session.turns.len() as u64);
        session.turns.truncate(turns as usize);
        self.requests_left -= turns;
        Some(session)
    }
}

impl Source {
    fn new(class: &Class, (seed, place): (u64, usize), rate: f64) -> Source {
        let mut source = Source {
            zipf: Zipf::new(class.tenants.count, class.tenants.zipf),
            class: class.clone(),
            place,
            seed,
            rate,
            rng: Rng::new(seed, u64::MAX - place as u64),
            index: 0,
            at: class.from,
            is_burst: true, // The first phase to begin is a calm.
            phase_ends: class.from,
        };
        source.advance();
        source
    }

    fn next(&mut self) -> Session {
        let (first, zipf) = (self.class.tenants.first, &self.zipf);
        let tenant = |rng: &mut Rng| first + zipf.draw(rng);
        let mut session = Session::draw(&self.class, (self.seed, self.place), self.index, tenant);
        session.at = self.at;
        self.index += 1;
        self.advance();
        session
    }

    /// Moves on to the next arrival.
    fn advance(&mut self) {
        match self.class.arrivals {
            Arrivals::Steady => self.at += 1.0 / self.rate,
            Arrivals::Poisson => self.at += self.rng.pause(1.0 / self.rate),
            Arrivals::Bursts {
                calm,
                burst,
                factor,
            } => self.advance_in_bursts(calm, burst, factor),
        }
    }

    /// An arrival that would fall into the next phase is drawn anew there: a Poisson process has no memory.
    fn advance_in_bursts(&mut self, calm: f64, burst: f64, factor: f64) {
        let calm_rate = self.rate * (calm + burst) / (calm + burst * factor);
        loop {
            let rate = if self.is_burst {
                calm_rate * factor
            } else {
                calm_rate
            };
            let at = self.at + self.rng.pause(1.0 / rate);
            if at <= self.phase_ends {
                self.at = at;
                return;
            }
            self.at = self.phase_ends;
            self.is_burst = !self.is_burst;
            let mean = if self.is_burst { burst } else { calm };
            self.phase_ends += self.rng.pause(mean);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{NAMES, named};

    fn sessions(name: &str, seed: u64) -> Vec<Session> {
        let workload = named(name).unwrap();
        Trace::new(&workload, seed, 5.0, 2000, f64::INFINITY).collect()
    }

    #[test]
    fn a_seed_is_a_trace() {
        for name in NAMES {
            assert_eq!(sessions(name, 7), sessions(name, 7), "{name}");
            assert_ne!(sessions(name, 7), sessions(name, 8), "{name}");
        }
    }

    #[test]
    fn sessions_come_in_order_and_at_the_asked_rate() {
        for arrivals in [
            Arrivals::Poisson,
            Arrivals::Steady,
            Arrivals::Bursts {
                calm: 5.0,
                burst: 1.0,
                factor: 10.0,
            },
        ] {
            let class = Class {
                arrivals,
                ..Class::default()
            };
            let workload = Workload {
                classes: vec![class],
                ..named("chat").unwrap()
            };
            let trace = Trace::new(&workload, 3, 10.0, 20_000, f64::INFINITY);
            let at: Vec<f64> = trace.map(|session| session.at).collect();
            assert!(at.is_sorted());
            let seconds = at.last().unwrap();
            assert!(
                (1_850.0..2_150.0).contains(seconds),
                "{arrivals:?}: {seconds}"
            );
        }
    }

    #[test]
    fn a_turn_repeats_what_was_said() {
        let sessions = sessions("chat", 1);
        let session = sessions.iter().find(|session| session.turns.len() > 1);
        let session = session.unwrap();
        let (first, second) = (session.prompt(0), session.prompt(1));
        assert_eq!(first.len() as u32, session.prompt_len(0));
        assert_eq!(second.len() as u32, session.prompt_len(1));
        assert!(second.starts_with(&first));
        let answer = &second[first.len()..][..session.turns[0].answer.tokens as usize];
        assert_eq!(answer.last(), Some(&crate::workload::STOP));
        assert_eq!(answer[0], session.turns[0].answer_token(0));
    }

    #[test]
    fn the_flooder_makes_nine_of_ten_arrivals() {
        let sessions = sessions("flooder", 1);
        let floods = sessions
            .iter()
            .filter(|session| session.tenant == 0)
            .count();
        assert!((1750..1850).contains(&floods), "{floods}");
    }
}
